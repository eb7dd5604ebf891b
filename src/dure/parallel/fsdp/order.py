"""The order in which all ranks unshard, or reduce: that of the first step.

FSDP2 records its `post_forward_order` in each step, and prefetches by it. Here the order of the
first step is kept, because ranks that skip a module must still join its collectives in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.parallel.fsdp.state import FSDPState

__all__ = ["ExecutionOrder"]


class ExecutionOrder:
    """The order in which the first step unsharded, or reduced, modules; later steps follow it.

    Attributes:
        is_recorded: The first step has ended.
        sequence: The order.
    """

    def __init__(self) -> None:
        self.sequence: list[FSDPState] = []
        self.is_recorded = False
        self._position = 0

    def begin(self) -> None:
        """Start from the first module."""
        self._position = 0

    def skipped(self, state: FSDPState) -> Sequence[FSDPState]:
        """Move to `state`, and return the states before it that were not called."""
        if not self.is_recorded:
            self.sequence.append(state)
            return ()
        if state not in self.sequence[self._position :]:
            return ()
        found = self.sequence.index(state, self._position)
        before = self.sequence[self._position : found]
        self._position = found + 1
        return before

    def upcoming(self) -> Sequence[FSDPState]:
        """Return the next state, or nothing if the order is not recorded yet."""
        return self.sequence[self._position : self._position + 1] if self.is_recorded else ()

    def end(self) -> Sequence[FSDPState]:
        """Finish recording; return the states at the end of the order that were not called."""
        rest = self.sequence[self._position :] if self.is_recorded else ()
        self.is_recorded, self._position = True, len(self.sequence)
        return rest
