"""An observer of a running job, beside the terminal: the page (`dure run --page`)."""

from __future__ import annotations

from typing import Protocol

from dure.launch.ranks.report import ReportedStep
from dure.launch.spec import Stream

__all__ = ["Watcher"]


class Watcher(Protocol):
    """Gets what the launcher learns of the ranks; their starts and ends are events of the job.

    Threads: it is called on the launcher's thread, which must never wait.
    """

    due_at: float
    """When `tick` is to be called, on `time.monotonic`."""

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Record lines that a rank wrote."""
        ...

    def spoke(self, rank: int, line: bytes) -> None:
        """Record the last line that a rank wrote, complete or not."""
        ...

    def progressed(self, rank: int, step: ReportedStep) -> None:
        """Record a rank's step (`dure.progress`)."""
        ...

    def tick(self, now: float) -> None:
        """Show the present state."""
        ...
