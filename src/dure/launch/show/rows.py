"""What is known of each rank while a job runs, for the page (`dure run --page`).

`Rows` records what happens to the ranks. The steps are what programs report with `dure.progress`;
memory and processor time are read from /proc, once per second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from dure.launch.ranks.report import Step
from dure.launch.spec import Stream

__all__ = ["REFRESH_S", "Row", "Rows", "Watcher", "indented", "plain"]

REFRESH_S = 0.2
_USAGE_S = 1.0
_LONGEST = 500  # bytes of a line that are looked at
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(slots=True)
class Row:
    """What is known of one rank; times are on `time.monotonic`."""

    rank: int
    pid: int
    host: str = ""
    state: str = "running"
    step: Step | None = None
    last: str = ""
    spoke_at: float = 0.0
    resident: int | None = None
    cpu: float | None = None
    process: psutil.Process | None = field(default=None, repr=False)

    def measure(self) -> None:
        """Read memory, and processor time since the last call; of an ended rank, nothing."""
        try:
            first = self.process is None
            self.process = self.process or psutil.Process(self.pid)
            self.resident = self.process.memory_info().rss
            cpu = self.process.cpu_percent() / 100
            self.cpu = None if first else cpu
        except psutil.Error:
            self.resident = self.cpu = None


class Watcher(Protocol):
    """An observer of a running job, beside the terminal: a page.

    Threads: it is called on the launcher's thread, which must never wait.
    """

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Record lines that a rank wrote."""
        ...

    def saw(self, rows: Sequence[Row]) -> None:
        """Record the present state of this host's ranks; called every `REFRESH_S`."""
        ...


class Rows:
    """The ranks of this host, and when the watcher gets them again."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._measured_at = float("-inf")
        self.due_at = 0.0

    def started(self, rank: int, pid: int, host: str = "") -> None:
        """Add a rank, or a new process in the place of one that ended."""
        self._rows[rank] = Row(rank, pid, host, spoke_at=time.monotonic())

    def ended(self, rank: int, ok: bool) -> None:
        """Record a rank's end."""
        row = self._rows[rank]
        row.state = "ended" if ok else "failed"
        row.resident = row.cpu = None

    def crashed(self, rank: int, text: str) -> None:
        """Record a rank's error."""
        row = self._rows[rank]
        row.state, row.last = "failed", plain(text.encode())

    def progressed(self, rank: int, step: Step) -> None:
        """Record a rank's step."""
        self._rows[rank].step = step

    def wrote(self, rank: int, line: bytes, now: float) -> None:
        """Record the last line that a rank wrote, complete or not."""
        row = self._rows[rank]
        if row.state == "running" and line.strip():
            row.last, row.spoke_at = plain(line[-_LONGEST:]), now

    def look(self, now: float) -> Sequence[Row]:
        """Return the ranks, measured again if the last time was long ago."""
        self.due_at = now + REFRESH_S
        if now - self._measured_at >= _USAGE_S:
            self._measured_at = now
            for row in self._rows.values():
                if row.state == "running":
                    row.measure()
        return list(self._rows.values())


def plain(line: bytes) -> str:
    """Return what a line looks like: its last redraw, without control characters."""
    return indented(line).strip()


def indented(line: bytes) -> str:
    """Return what a line looks like, with the spaces at its start."""
    text = _ESCAPES.sub("", line.decode(errors="replace"))
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return "".join(c if c.isprintable() else " " for c in text).rstrip()
