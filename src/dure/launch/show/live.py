"""The live view: a table at the bottom of the terminal, a row a rank; the output scrolls above it.

    ── train.py · 4 ranks · 1:23 ───────────────────────────────────────────────
     rank  state    step               cpu   memory  quiet  last line
        0  running  120/1000 ━━╌╌╌╌╌╌  98%  412 MiB     0s  epoch 2, loss 0.31
        1  failed   118/1000 ━━╌╌╌╌╌╌    -        -     4s  ValueError: my bug

`Rows` notes what happens to the ranks, and `draw` has rich make a table of it, which fits into the
terminal: a line that wraps could not be erased. (`rich.live` itself would write to the terminal and
wait for it, which the launcher must never do: the sink keeps the table below what it writes.) What
ranks write is shown without its control characters. The steps are what programs tell by
`dure.progress`; memory and processor time are read from /proc, once a second.

Cost: a drawing takes some 5 ms for 8 ranks, `REFRESH_S` apart, in the launcher alone; rich is
imported for the first.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from dure.launch.ranks.report import Step
from dure.launch.spec import Stream

__all__ = ["REFRESH_S", "Row", "Rows", "Watcher", "draw", "indented", "plain"]

REFRESH_S = 0.2
_USAGE_S = 1.0
_BAR = 8
_LONGEST = 500  # bytes of a line that are looked at
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_HEAD = (" rank", "state  ", "step", "  cpu", "   memory", "quiet")
_LEAST_LAST = 10  # columns for the last line; what does not fit then is cut off
_STATES = {"failed": "red", "ended": "green"}


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
        """Read memory and processor time since the last look; of a rank that has ended, nothing."""
        try:
            first = self.process is None
            self.process = self.process or psutil.Process(self.pid)
            self.resident = self.process.memory_info().rss
            cpu = self.process.cpu_percent() / 100
            self.cpu = None if first else cpu
        except psutil.Error:
            self.resident = self.cpu = None


class Watcher(Protocol):
    """Who looks on while a job runs, beside the terminal: a page.

    Threads: it is called on the launcher's, which must never wait.
    """

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Take note of lines that a rank wrote."""
        ...

    def saw(self, rows: Sequence[Row]) -> None:
        """Take note of this host's ranks as they are now; called every `REFRESH_S`."""
        ...


class Rows:
    """The ranks of this host, and when they are to be drawn again."""

    def __init__(self, title: str) -> None:
        self._title = plain(title.encode(errors="backslashreplace"))
        self._rows: dict[int, Row] = {}
        self._began_at = time.monotonic()
        self._measured_at = float("-inf")
        self.draw_at = 0.0

    def started(self, rank: int, pid: int, host: str = "") -> None:
        """Add a rank, or put a new process in an ended one's place."""
        self._rows[rank] = Row(rank, pid, host, spoke_at=time.monotonic())

    def ended(self, rank: int, ok: bool) -> None:
        row = self._rows[rank]
        row.state = "ended" if ok else "failed"
        row.resident = row.cpu = None

    def crashed(self, rank: int, text: str) -> None:
        row = self._rows[rank]
        row.state, row.last = "failed", plain(text.encode())

    def progressed(self, rank: int, step: Step) -> None:
        self._rows[rank].step = step

    def wrote(self, rank: int, line: bytes, now: float) -> None:
        """Take note of the last line, whole or not, that a rank wrote."""
        row = self._rows[rank]
        if row.state == "running" and line.strip():
            row.last, row.spoke_at = plain(line[-_LONGEST:]), now

    def look(self, now: float) -> Sequence[Row]:
        """Return the ranks, measured anew if the last time was long ago."""
        self.draw_at = now + REFRESH_S
        if now - self._measured_at >= _USAGE_S:
            self._measured_at = now
            for row in self._rows.values():
                if row.state == "running":
                    row.measure()
        return list(self._rows.values())

    def draw(self, now: float, width: int, height: int) -> list[str]:
        rows = self.look(now)
        minutes, seconds = divmod(int(now - self._began_at), 60)
        title = f"{self._title} · {len(rows)} ranks · {minutes}:{seconds:02}"
        return draw(title, rows, now, width, height)


def draw(title: str, rows: Sequence[Row], now: float, width: int, height: int) -> list[str]:
    """Return the table as lines that fit into a terminal.

    Where there are more ranks than fit into half of its height, those that failed or have come
    least far are shown.
    """
    from rich.cells import cell_len  # lazy: as below
    from rich.console import Console  # lazy: 50 ms, and only some jobs have a live view
    from rich.rule import Rule  # lazy: as before
    from rich.table import Table  # lazy: as before
    from rich.text import Text  # lazy: as before

    room = max(1, height // 2 - 2)
    urgent = rows if len(rows) <= room else sorted(rows, key=_urgency)[: room - 1]
    shown = sorted(urgent, key=lambda row: row.rank)
    cells = [_cells(row, now) for row in shown]
    taken = sum(2 + max(map(cell_len, column)) for column in zip(_HEAD, *cells, strict=True))
    left = max(_LEAST_LAST, width - 1 - taken)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=taken + left)
    for name in _HEAD:
        right = name not in ("state  ", "step")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", width=left)
    for row, (rank, state, *more) in zip(shown, cells, strict=True):
        table.add_row(rank, Text(state, _STATES.get(state, "")), *map(Text, more), Text(row.last))
    out = io.StringIO()
    console = Console(
        file=out, width=width - 1, force_terminal=True, color_system="standard", highlight=False
    )
    console.print(Rule(Text(title), align="left", style="bold"), table, crop=True)
    if len(urgent) < len(rows):
        more = Text(f"... and {len(rows) - len(urgent)} ranks more", "dim")
        console.print(more, no_wrap=True, overflow="ellipsis")
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _cells(row: Row, now: float) -> tuple[str, ...]:
    return (
        str(row.rank),
        row.state,
        _step(row),
        "-" if row.cpu is None else f"{row.cpu:.0%}",
        "-" if row.resident is None else f"{row.resident >> 20} MiB",
        f"{now - row.spoke_at:.0f}s" if row.state == "running" else "",
    )


def _urgency(row: Row) -> tuple[bool, float, int]:
    return (row.state != "failed", row.step.step if row.step else -1, row.rank)


def _step(row: Row) -> str:
    """Say how far a rank has come: `120/1000 ━━╌╌╌╌╌╌ loss 0.31`."""
    if row.step is None:
        return ""
    step, total = row.step.step, row.step.total
    text = str(step)
    if total:
        full = min(_BAR, max(0, _BAR * step // total))
        text = f"{step:>{len(str(total))}}/{total} {'━' * full}{'╌' * (_BAR - full)}"
    values = " ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.step.values.items()
    )
    return plain(f"{text} {values}".rstrip().encode())


def plain(line: bytes) -> str:
    """Return what a line looks like: the last that it wrote over itself, without controls."""
    return indented(line).strip()


def indented(line: bytes) -> str:
    """Return what a line looks like, with the spaces that it begins with."""
    text = _ESCAPES.sub("", line.decode(errors="replace"))
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return "".join(c if c.isprintable() else " " for c in text).rstrip()
