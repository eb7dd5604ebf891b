"""`ProcessGroup`: a set of ranks that communicate.

The class is made of three parts, one file each: `core` (membership, and how an operation is run),
`operations` (the slow path of each), and `plain`, the fast path of plain tensors;
`aliases.EngineNames` adds the names under which code written for torch's C++ groups calls the same
operations.
"""

from __future__ import annotations

from dure.comm.aliases import EngineNames
from dure.comm.group.plain import Plain

__all__ = ["ProcessGroup"]


class ProcessGroup(Plain, EngineNames):
    """The ranks of one group, seen from one of them.

    All ranks must call the collectives of a group in the same order. Groups are independent of
    each other, and point-to-point messages are independent of collectives. Ranks given to methods
    are group ranks; those of the public functions (`dure.broadcast`, ...) are global ranks.

    Threads: one operation at a time; `Work` objects may be used from any thread. Tensors belong to
    an operation until it has ended.
    """
