"""Many ranks' output on one terminal, line by line.

Each pipe has a `LineReader`, which cuts bytes into lines, and the terminal (or file) has a `Sink`,
which writes them with a prefix. The rules:

- A line is written in one piece: a long one is held back until its newline has come.
- A line without an end (a prompt, a progress bar) is shown once nothing has come for `IDLE_S`; in a
  file, one that returns to its start (a progress bar, which may never be idle) every `PATIENCE_S`.
  More output of the same pipe continues it; that of another pipe starts a new line first.
- Bytes are passed on as they are. On a terminal, a line that returns to its start is drawn in an
  *area* at the bottom (see `screen`), with one prefix per row.
- The launcher must never wait for the reader of its output, or it could not end the job. So the
  sink queues, writes only what the kernel takes at once, and reports when it is `full`: the
  launcher then stops reading from the ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections import deque
from collections.abc import Sequence

from dure.launch.spec import Stream

__all__ = ["IDLE_S", "PATIENCE_S", "LineReader", "Sink", "same_file"]

IDLE_S = 0.2
PATIENCE_S = 1.0
_HOLD_BYTES = 64 << 20  # the longest line that is held back
_QUEUE_BYTES = 1 << 20
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"


class LineReader:
    """Cuts the bytes of one pipe into lines.

    Attributes:
        rows: Lines that the program may still change: see `screen`.
    """

    def __init__(self, rank: int, stream: Stream) -> None:
        self.rank = rank
        self.stream: Stream = stream
        self.rows: list[bytes] = []
        self._last_at = self._begun_at = 0.0
        self._returns = False  # the line goes back to its start
        self._parts: list[bytes] = []
        self._held_bytes = 0

    @property
    def holds(self) -> bool:
        """Whether some of an unfinished line is held back."""
        return bool(self._parts)

    @property
    def show_at(self) -> float:
        """When what is held back is shown, finished or not."""
        idle = self._last_at + IDLE_S
        return min(idle, self._begun_at + PATIENCE_S) if self._returns else idle

    @property
    def held(self) -> bytes:
        """The latest part of an unfinished line that is held back."""
        return self._parts[-1] if self._parts else b""

    @property
    def overfull(self) -> bool:
        """Whether so much is held back that it must be shown now."""
        return self._held_bytes > _HOLD_BYTES

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take bytes, and return the lines that they complete, without their newlines."""
        self._last_at = now
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts.clear()
            self._held_bytes = 0
        if rest:
            if not self._parts:
                self._begun_at, self._returns = now, False
            self._returns = self._returns or b"\r" in rest
            self._parts.append(rest)
            self._held_bytes += len(rest)
        return lines

    def overdue(self) -> tuple[list[bytes], bytes]:
        """Return the lines and the part of a line that wait no longer for what comes next."""
        return [], self.flush()

    def flush(self) -> bytes:
        """Return what is held back of an unfinished line, and hold it back no longer."""
        text = b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        return text


class Sink:
    """Where prefixed lines go: a terminal, a pipe or a file that this process has open.

    Args:
        fd: The open descriptor, which stays the caller's.

    Attributes:
        broken: Whether nothing more can be written.
        trouble: Why, if writing has failed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False
        self.trouble: OSError | None = None
        self._may_block = True
        self.terminal = os.isatty(fd)
        self._fresh: list[bytes] = []  # comes after the queue
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._area: list[bytes] = []  # rows that stay below everything that is written
        self._drawn = 0  # how many of them are on the terminal
        self._redraw = False
        self._owner: object = None  # the pipe behind whose unfinished line the cursor is
        try:
            self._may_block = not stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:  # the descriptor was closed before we started
            self.broken = True
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for the reader to take more."""
        return bool(self._queue or self._fresh or self._redraw)

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be put in."""
        return self._queued_bytes >= _QUEUE_BYTES

    def is_behind(self, owner: object) -> bool:
        """Whether the cursor is behind an unfinished line of this owner."""
        return self._owner is owner

    def put(self, owner: object, prefix: bytes, lines: list[bytes]) -> None:
        """Queue complete lines of one pipe, which `owner` identifies."""
        if not lines:
            return
        body = (b"\n" + prefix).join(lines) + b"\n"
        self._push(body if self._owner is owner else self._fresh_line() + prefix + body)
        self._owner = None

    def put_part(self, owner: object, prefix: bytes, text: bytes) -> None:
        """Queue a part of a pipe's line, whose end has not come."""
        before = b"" if self._owner is owner else self._fresh_line() + prefix
        self._push(before + text)
        self._owner = owner

    def say(self, text: str) -> None:
        """Queue a line of the launcher."""
        self._push(self._fresh_line() + text.encode(errors="backslashreplace") + b"\n")

    def put_area(self, rows: Sequence[bytes]) -> None:
        """Keep rows at the bottom of the terminal, in place of those kept before.

        A row that is longer than a line of the terminal is cut off by the terminal.
        """
        if not self.broken and (rows or self._area):
            self._area = list(rows)
            self._redraw = True

    def finish(self) -> None:
        """Leave the cursor at the start of a line."""
        self._push(self._fresh_line())

    def write_some(self) -> None:
        """Write as much as can be written without waiting."""
        self.drain(0.0)

    def drain(self, timeout_s: float) -> None:
        """Write everything, waiting at most `timeout_s` for each chunk to be taken."""
        self._gather()
        while self._queue and not self.broken and self._ready(timeout_s):
            self._write_chunk()

    def _fresh_line(self) -> bytes:
        """Return what brings the cursor to the start of a line, and count it as there."""
        newline = b"" if self._owner is None else b"\n"
        self._owner = None
        return newline

    def _push(self, data: bytes) -> None:
        if data and not self.broken:
            self._fresh.append(data)
            self._queued_bytes += len(data)

    def _gather(self) -> None:
        """Make one chunk of what was pushed: each costs a system call."""
        if not self._fresh and not self._redraw:
            return
        erase = b"\x1b[%dF\x1b[J" % self._drawn if self._drawn else b""
        area = b""
        if self._area:
            rows = b"".join(row + b"\x1b[0m\n" for row in self._area)
            area = self._fresh_line() + _NO_WRAP + rows + _WRAP
        self._drawn, self._redraw = len(self._area), False
        data = b"".join((erase, *self._fresh, area))
        self._queued_bytes += len(erase) + len(area)
        self._fresh.clear()
        if data:
            self._queue.append(memoryview(data))

    def _ready(self, timeout_s: float) -> bool:
        return not self._may_block or bool(self._poll.poll(timeout_s * 1000))

    def _write_chunk(self) -> None:
        """Write one chunk: PIPE_BUF bytes never block where poll has said "writable"."""
        data = self._queue.popleft()
        limit = select.PIPE_BUF if self._may_block else len(data)
        try:
            written = os.write(self.fd, data[:limit])
        except BlockingIOError:
            written = 0
        except OSError as error:  # the reader has gone, or the disk is full
            self.broken, self.trouble = True, error
            self._queue.clear()
            self._fresh.clear()
            self._queued_bytes = 0
            return
        self._queued_bytes -= written
        if written < len(data):
            self._queue.appendleft(data[written:])


def same_file(first: int, second: int) -> bool:
    """Whether two descriptors are one file, so that a line begun on one is seen on the other."""
    with contextlib.suppress(OSError):
        a, b = os.fstat(first), os.fstat(second)
        return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
    return False
