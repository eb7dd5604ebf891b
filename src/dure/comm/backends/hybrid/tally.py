"""The tally: how many collectives each rank of this host has ended.

A rank that goes away, in order or not, must not break what it has been through: others may still be
on their way out of it. So every rank notes each end in memory that the ranks of its host share,
where it can still be read when the rank itself cannot be asked any more. Whoever finds that a rank
is gone knows from there which operation is the first that will never take place (fate.py).

Cost: one store into memory for each collective.
"""

from __future__ import annotations

import ctypes

from dure.comm.backends.shm.backend import ShmBackend

__all__ = ["Tally"]

_WORD = ctypes.sizeof(ctypes.c_int64)


class Tally:
    """The tally of one host, seen from one rank. Threads: reading, any; `end`, one at a time.

    Args:
        local: The ranks of this host.
        place: This rank's number among them.
        size: How many they are.

    Collective:
        All ranks of the host make it.
    """

    def __init__(self, local: ShmBackend, place: int, size: int) -> None:
        self._memory = local.host_shared_empty(size * _WORD)
        self._cells = (ctypes.c_int64 * size).from_address(self._memory.data_ptr())
        self._place = place

    @property
    def mine(self) -> int:
        """How many collectives this rank has ended."""
        return self._cells[self._place]

    def of(self, place: int) -> int:
        """Return how many collectives the rank with local number `place` has ended."""
        return self._cells[place]

    def end(self) -> None:
        """Note that this rank has ended one more."""
        self._cells[self._place] += 1
