"""Marks: what a program says of its steps (`dure.log`), kept only while somebody reads.

A reader is the page of the run (`publishing`), or `record_steps`. Without one a mark goes nowhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Mark", "Marks"]

_CAPACITY = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a rank said of one step.

    Attributes:
        step: Its number, as the program counts.
        time_ns: When it was said, on `time.monotonic_ns`.
        scalars: Values by name; None stands for one that is not finite, which JSON does not have.
    """

    step: int
    time_ns: int
    scalars: dict[str, float | None] = field(default_factory=dict[str, float | None])


class Marks:
    """The last marks of a process.

    Threads: every method may be called from any thread; a mark is one append.

    Attributes:
        num_readers: How many want them; nothing is kept while nobody does.
    """

    def __init__(self) -> None:
        self.num_readers = 0
        self._kept: deque[Mark] = deque(maxlen=_CAPACITY)

    def keep(self, mark: Mark) -> None:
        """Keep `mark`, if somebody reads; the oldest one goes where there are too many."""
        if self.num_readers:
            self._kept.append(mark)

    def last(self, number: int = _CAPACITY) -> list[Mark]:
        """Return the last marks, the oldest first."""
        return list(self._kept)[-number:]
