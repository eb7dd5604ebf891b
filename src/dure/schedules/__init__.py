"""Pipelines' schedules as data: for each rank the list of what it does, without torch.

A schedule is generated (`gpipe`, `one_f_one_b`, ...) or read from CSV, and is a plain value,
`Schedule`. `actions.py` has the vocabulary.
"""

from dure.schedules.actions import Action, Kind, Schedule, loop_placement, v_placement

__all__ = ["Action", "Kind", "Schedule", "loop_placement", "v_placement"]
