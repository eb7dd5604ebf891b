"""The order in which all ranks gather, or reduce: that of the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.parallel.fsdp.state import FSDPState

__all__ = ["Order"]


class Order:
    """In which order the first step gathered, or reduced; later steps keep to it.

    Attributes:
        is_known: A step was made.
        sequence: The order.
    """

    def __init__(self) -> None:
        self.sequence: list[FSDPState] = []
        self.is_known = False
        self._at = 0

    def begin(self) -> None:
        """Begin at the first."""
        self._at = 0

    def skipped(self, state: FSDPState) -> Sequence[FSDPState]:
        """Return those that come before `state`, and were not called; it is called next."""
        if not self.is_known:
            self.sequence.append(state)
            return ()
        if state not in self.sequence[self._at :]:
            return ()
        found = self.sequence.index(state, self._at)
        before = self.sequence[self._at : found]
        self._at = found + 1
        return before

    def coming(self) -> Sequence[FSDPState]:
        """Return the next one, or nothing where that is not known."""
        return self.sequence[self._at : self._at + 1] if self.is_known else ()

    def end(self) -> Sequence[FSDPState]:
        """Return those that were not called; from now on the order is known."""
        rest = self.sequence[self._at :] if self.is_known else ()
        self.is_known, self._at = True, len(self.sequence)
        return rest
