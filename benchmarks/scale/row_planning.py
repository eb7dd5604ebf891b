"""Row 8: a pipeline of one stage per rank, validated, proved and simulated.

Ranks run 32 microbatches per stage with 1F1B: 4,096 of 128 stages. The lists have transfers, as
the runtime executes them, so there are three times as many actions as computations.
"""

from __future__ import annotations

from counting import processor_time, resident_mb

from dure.schedules import make_schedule, prove_no_deadlock, simulate, validate
from dure.schedules.lower import lower

TITLE = "a pipeline of a stage per rank and 32 microbatches per stage"
RANKS = (16, 64, 128)


def measure(ranks: int) -> dict[str, float]:
    """Validate, prove and simulate."""
    figures: dict[str, float] = {}
    grid = make_schedule("1f1b", stages=ranks, microbatches=32 * ranks, ranks=ranks)
    with processor_time(figures, "CPU s of a simulation without transfers"):
        simulate(grid)
    with processor_time(figures, "CPU s of adding transfers"):
        lists = lower(grid)
    figures["actions"] = sum(len(actions) for actions in lists.ranks)
    with processor_time(figures, "CPU s of validation"):
        validate(lists)
    with processor_time(figures, "CPU s of the proof"):
        prove_no_deadlock(lists)
    with processor_time(figures, "CPU s of a simulation"):
        simulate(lists)
    figures["MB of memory"] = resident_mb()
    return figures
