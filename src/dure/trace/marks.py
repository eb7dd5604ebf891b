"""Marks: values that a program reports for its steps (`dure.log`).

They are recorded only while there is a reader: the page of the run (`publishing`) or
`record_steps`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Mark", "Marks"]

_CAPACITY = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The values that a rank reported for one step.

    Attributes:
        step: The number of the step, as the program counts.
        time_ns: Time of the report, on `time.monotonic_ns`.
        scalars: Values by name; None for a value that is not finite, which JSON cannot represent.
    """

    step: int
    time_ns: int
    scalars: dict[str, float | None] = field(default_factory=dict[str, float | None])


class Marks:
    """The last marks of a process.

    Threads: every method may be called from any thread; a mark is one append.

    Attributes:
        num_readers: The number of readers; without one, marks are dropped.
    """

    def __init__(self) -> None:
        self.num_readers = 0
        self._kept: deque[Mark] = deque(maxlen=_CAPACITY)

    def keep(self, mark: Mark) -> None:
        """Keep `mark` if there is a reader; drops the oldest mark if there are too many."""
        if self.num_readers:
            self._kept.append(mark)

    def last(self, number: int = _CAPACITY) -> list[Mark]:
        """Return the last marks, the oldest first."""
        return list(self._kept)[-number:]
