"""A breakpoint in one rank of a job, while the others wait."""

from __future__ import annotations

import pdb  # noqa: T100 (this is the function that stops in it)
import sys
from collections import Counter
from datetime import timedelta
from typing import TextIO

from dure.comm.call import call_site
from dure.comm.collectives import barrier
from dure.comm.world import current_world

__all__ = ["breakpoint"]

_calls: Counter[tuple[int, str]] = Counter()
"""How often this rank has reached each line with a breakpoint."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop in the debugger on one rank; the others wait until it continues.

    The debugger reads the terminal, so start the job in the foreground. Type `up` to get to the
    frame of the caller.

    Args:
        rank: The rank that stops.
        skip: How many times the line is passed before the rank stops there.
        timeout_s: While it stops, operations of all groups wait this long; if None, as before.

    Collective:
        All ranks call.

    Example:
        ```python
        for step in range(3):
            dist.breakpoint(rank=1, skip=100)  # rank 1 would stop in step 100
        ```
    """
    world = current_world()
    default = world.need_default()
    site = default.rank(), call_site()
    _calls[site] += 1
    if _calls[site] <= skip:
        return
    before = [(group, group.timeout, group.creation_timeout) for group in world.groups.values()]
    if timeout_s is not None:
        for group, _, _ in before:
            group.set_timeout(timedelta(seconds=timeout_s))
    try:
        if default.rank() == rank:
            debugger = _debugger()
            debugger.message(f"rank {rank} stops; type 'up' to get to the line of the program")
            debugger.set_trace()
        barrier()
    finally:
        for group, timeout, creation_timeout in before:
            group.set_timeout(timeout)
            group.creation_timeout = creation_timeout


def _debugger() -> pdb.Pdb:
    """Return a debugger that reads the terminal: in a process that was started, stdin is closed."""
    terminal: TextIO = open("/dev/stdin")  # noqa: SIM115 (it is read until the program continues)
    return pdb.Pdb(stdin=terminal, stdout=sys.stdout)
