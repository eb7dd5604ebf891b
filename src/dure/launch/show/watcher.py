"""Observers of a running job, beside the terminal: the page (`dure run --page`), and metrics."""

from __future__ import annotations

from typing import Protocol

from dure.launch.ranks.report import ReportedStep
from dure.launch.spec import Stream

__all__ = ["Watcher", "Watchers"]


class Watcher(Protocol):
    """Gets what the launcher learns of the ranks; their starts and ends are events of the job.

    Threads:
        It is called on the launcher's thread, which must never wait.
    """

    @property
    def due_at(self) -> float:
        """When `tick` is to be called, on `time.monotonic`."""
        ...

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


class Watchers:
    """Several observers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    @property
    def due_at(self) -> float:
        """When `tick` is to be called."""
        return min(watcher.due_at for watcher in self._watchers)

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Pass on lines that a rank wrote."""
        for watcher in self._watchers:
            watcher.wrote(rank, stream, lines)

    def spoke(self, rank: int, line: bytes) -> None:
        """Pass on the last line that a rank wrote."""
        for watcher in self._watchers:
            watcher.spoke(rank, line)

    def progressed(self, rank: int, step: ReportedStep) -> None:
        """Pass on a rank's step."""
        for watcher in self._watchers:
            watcher.progressed(rank, step)

    def tick(self, now: float) -> None:
        """Pass on the time, to those that are due."""
        for watcher in self._watchers:
            if now >= watcher.due_at:
                watcher.tick(now)
