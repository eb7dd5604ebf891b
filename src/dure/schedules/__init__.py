"""Pipelines' schedules as data: for each rank the list of what it does, without torch.

A schedule is generated (`make_schedule`, or a generator such as `gpipe`) and is a plain value,
`Schedule`. `actions.py` has the vocabulary. It is checked (`validate`), proved free of
deadlock (`prove_no_deadlock`), given its transfers (`lower`), and simulated (`simulate`), all of it
before any rank starts.
"""

from dure.schedules.actions import Action, Kind, Schedule, loop_placement, v_placement
from dure.schedules.catalog import SCHEDULES, Generator, find_generator, make_schedule
from dure.schedules.csv_files import read_csv, write_csv
from dure.schedules.drawing import draw_svg, draw_text
from dure.schedules.execution import Span, Spans, prove_no_deadlock
from dure.schedules.fill_drain import forward_only, gpipe, looped_bfs
from dure.schedules.lower import lower
from dure.schedules.one_f_one_b import interleaved_1f1b, interleaved_zero_bubble, one_f_one_b
from dure.schedules.simulate import DEFAULT_TIMES, Simulation, simulate
from dure.schedules.v_shaped import dualpipe_v, zb_v
from dure.schedules.validate import validate

__all__ = [
    "DEFAULT_TIMES",
    "SCHEDULES",
    "Action",
    "Generator",
    "Kind",
    "Schedule",
    "Simulation",
    "Span",
    "Spans",
    "draw_svg",
    "draw_text",
    "dualpipe_v",
    "find_generator",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "loop_placement",
    "looped_bfs",
    "lower",
    "make_schedule",
    "one_f_one_b",
    "prove_no_deadlock",
    "read_csv",
    "simulate",
    "v_placement",
    "validate",
    "write_csv",
    "zb_v",
]
