"""The live view: a table at the bottom of the terminal, a row a rank; the output scrolls above it.

    ── train.py · 4 ranks · 1:23 ───────────────────────────────────────────────
     rank  state      step               cpu   memory  quiet  last line
        0  running    120/1000 ━━╌╌╌╌╌╌  98%  412 MiB     0s  epoch 2, loss 0.31
        1  failed     118/1000 ━━╌╌╌╌╌╌    -        -     4s  ValueError: my bug

`Rows` notes what happens to the ranks, and `draw` makes lines of it: plain text and a few escape
sequences, no wider than the terminal, for a line that wraps could not be erased. What ranks
write is shown without its control characters. The steps are what programs tell by
`dure.progress`; memory and processor time are read from /proc, once a second.

Cost: a drawing takes some 0.5 ms for 8 ranks, `REFRESH_S` apart, in the launcher alone.
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
from dataclasses import dataclass, field

from dure.launch.ranks.report import Step

__all__ = ["REFRESH_S", "Row", "Rows", "draw", "plain"]

REFRESH_S = 0.2
_USAGE_S = 1.0
_BAR = 8
_LONGEST = 500  # bytes of a line that are looked at
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_BOLD, _DIM, _RED, _GREEN, _END = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
_STATES = {"failed": _RED, "ended": _GREEN}


@dataclass(slots=True)
class Row:
    """What is known of one rank; times are on `time.monotonic`."""

    rank: int
    pid: int
    state: str = "running"
    step: Step | None = None
    last: str = ""
    spoke_at: float = 0.0
    resident: int | None = None
    cpu: float | None = None
    _ticks: tuple[float, int] | None = field(default=None, repr=False)

    def measure(self, now: float) -> None:
        """Read memory and processor time; of a rank that has ended, nothing."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                self.resident = int(file.read().split()[1]) * _PAGE
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (OSError, IndexError):
            self.resident = self.cpu = None
            return
        ticks = int(fields[11]) + int(fields[12])
        if self._ticks is not None and now > self._ticks[0]:
            self.cpu = (ticks - self._ticks[1]) / _TICKS / (now - self._ticks[0])
        self._ticks = (now, ticks)


class Rows:
    """The ranks of this host, and when they are to be drawn again.

    Args:
        title: What is running.
    """

    def __init__(self, title: str) -> None:
        self._title = plain(title.encode(errors="backslashreplace"))
        self._rows: dict[int, Row] = {}
        self._began_at = time.monotonic()
        self._measured_at = float("-inf")
        self.draw_at = 0.0

    def started(self, rank: int, pid: int) -> None:
        """Add a rank, or put a new process in an ended one's place."""
        self._rows[rank] = Row(rank, pid, spoke_at=time.monotonic())

    def ended(self, rank: int, ok: bool) -> None:
        """Take note of a rank's end."""
        row = self._rows.get(rank)
        if row is not None:
            row.state = "ended" if ok else "failed"
            row.resident = row.cpu = None

    def crashed(self, rank: int, text: str) -> None:
        """Take note of the exception that leaves a rank."""
        row = self._rows.get(rank)
        if row is not None:
            row.state, row.last = "failed", plain(text.encode())

    def progressed(self, rank: int, step: Step) -> None:
        """Take note of how far a rank has come."""
        row = self._rows.get(rank)
        if row is not None:
            row.step = step

    def wrote(self, rank: int, line: bytes, now: float) -> None:
        """Take note of the last line, whole or not, that a rank wrote."""
        row = self._rows.get(rank)
        if row is not None and row.state == "running" and line.strip():
            row.last, row.spoke_at = plain(line[-_LONGEST:]), now

    def draw(self, now: float, width: int, height: int) -> list[str]:
        """Return the lines to show now."""
        self.draw_at = now + REFRESH_S
        if now - self._measured_at >= _USAGE_S:
            self._measured_at = now
            for row in self._rows.values():
                if row.state == "running":
                    row.measure(now)
        minutes, seconds = divmod(int(now - self._began_at), 60)
        title = f"{self._title} · {len(self._rows)} ranks · {minutes}:{seconds:02}"
        return draw(title, list(self._rows.values()), now, width, height)


def draw(title: str, rows: list[Row], now: float, width: int, height: int) -> list[str]:
    """Return the table as lines that fit into a terminal.

    Where there are more ranks than fit into half of its height, those that failed or have come
    least far are shown.
    """
    room = max(1, height // 2 - 2)
    urgent = rows if len(rows) <= room else sorted(rows, key=_urgency)[: room - 1]
    shown = sorted(urgent, key=lambda row: row.rank)
    steps = [_step(row) for row in shown]
    step_width = max([len("step"), *map(_width, steps)])
    head = f" rank  state    {'step':<{step_width}}   cpu    memory  quiet  last line"
    title = f"── {_cut(title, max(1, width - 8))} "
    rule = title + "─" * (width - 1 - _width(title))
    lines = [f"{_BOLD}{rule}{_END}", f"{_DIM}{_cut(head, width - 1)}{_END}"]
    for row, step in zip(shown, steps, strict=True):
        lines.append(_line(row, step + " " * (step_width - _width(step)), now, width))
    if len(shown) < len(rows):
        more = _cut(f" ... and {len(rows) - len(shown)} ranks more", width - 1)
        lines.append(f"{_DIM}{more}{_END}")
    return lines


def _urgency(row: Row) -> tuple[bool, float, int]:
    return (row.state != "failed", row.step.step if row.step else -1, row.rank)


def _line(row: Row, step: str, now: float, width: int) -> str:
    cpu = "-" if row.cpu is None else f"{row.cpu * 100:.0f}%"
    memory = "-" if row.resident is None else f"{row.resident >> 20} MiB"
    quiet = f"{now - row.spoke_at:.0f}s" if row.state == "running" else ""
    state = f"{row.state:<7}"
    text = f" {row.rank:>4}  {state}  {step} {cpu:>5} {memory:>9} {quiet:>6}  {row.last}"
    text = _cut(text, width - 1)
    colour = _STATES.get(row.state)
    return text if colour is None else text.replace(state, f"{colour}{state}{_END}", 1)


def _step(row: Row) -> str:
    """Say how far a rank has come: `120/1000 ━━╌╌╌╌╌╌ loss 0.31`."""
    if row.step is None:
        return ""
    step, total = row.step.step, row.step.total
    text = str(step)
    if total:
        full = min(_BAR, max(0, _BAR * step // total))
        text = f"{step:>{len(str(total))}}/{total} {'━' * full}{'╌' * (_BAR - full)}"
    values = " ".join(f"{k} {_number(v)}" for k, v in row.step.values.items())
    return plain(f"{text} {values}".rstrip().encode())


def _number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plain(line: bytes) -> str:
    """Return what a line looks like: the last that it wrote over itself, without controls."""
    text = _ESCAPES.sub("", line.decode(errors="replace"))
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _width(text: str) -> int:
    """Return how many columns a text takes: Korean and Chinese letters take two."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _cut(text: str, width: int) -> str:
    """Return as much of a text as fits."""
    if len(text) * 2 <= width or _width(text) <= width:
        return text
    used, kept = 0, 0
    for letter in text:
        used += 1 + (unicodedata.east_asian_width(letter) in "WF")
        if used >= width:  # one column for the mark
            break
        kept += 1
    return text[:kept] + "…"
