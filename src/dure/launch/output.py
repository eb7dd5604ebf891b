"""Many ranks' output on one terminal, line by line.

Each pipe has a `LineReader`, which cuts what comes into lines, and the terminal (or file) has a
`Sink`, which writes them with a prefix. The rules:

- A line is written whole: a long one is held back until its newline has come, so that lines of
  several ranks do not mix.
- A line without an end (a prompt, a progress bar) is shown once nothing has come for `IDLE_S`, or
  `PATIENCE_S` after it began, since a progress bar may never be idle. The sink remembers whose it is: what comes next from the same pipe goes on behind it; what comes from
  another one starts a new line first.
- Bytes are passed on as they are, whatever they mean. Only on a terminal, a carriage return is
  followed by the prefix again, since it makes the cursor go back over it.
- The launcher must never wait for who reads its output, or it could not end the job. So the sink
  queues, writes only what the kernel takes at once, and says when it is `full`: the launcher then
  stops reading from the ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from dure.launch.spec import Stream

__all__ = ["LineReader", "Piece", "Sink", "same_file"]

IDLE_S = 0.2
PATIENCE_S = 1.0
_HOLD_BYTES = 64 << 20  # the longest line that is held back
_QUEUE_BYTES = 1 << 20


class Piece(NamedTuple):
    """Some bytes of one pipe's current line; `ends` says that its newline followed."""

    text: bytes
    ends: bool


class LineReader:
    """Cuts the bytes of one pipe into lines."""

    def __init__(self, rank: int, stream: Stream) -> None:
        self.rank = rank
        self.stream: Stream = stream
        self._last_at = self._begun_at = 0.0
        self._parts: list[bytes] = []
        self._held_bytes = 0

    @property
    def holds(self) -> bool:
        """Whether an unfinished line is held back."""
        return bool(self._parts)

    @property
    def show_at(self) -> float:
        """When what is held back should be shown, finished or not."""
        return min(self._last_at + IDLE_S, self._begun_at + PATIENCE_S)

    def feed(self, data: bytes, now: float) -> list[Piece]:
        """Take bytes and return the lines that they complete."""
        self._last_at = now
        if not self._parts:
            self._begun_at = now
        *lines, rest = data.split(b"\n")
        pieces: list[Piece] = []
        for line in lines:
            self._parts.append(line)
            pieces.append(Piece(b"".join(self._parts), ends=True))
            self._parts.clear()
            self._held_bytes = 0
        if rest:
            if lines:
                self._begun_at = now
            self._parts.append(rest)
            self._held_bytes += len(rest)
        if self._held_bytes > _HOLD_BYTES:
            pieces.extend(self.flush())
        return pieces

    def flush(self) -> list[Piece]:
        """Return what is held back of an unfinished line, if anything."""
        if not self._parts:
            return []
        piece = Piece(b"".join(self._parts), ends=False)
        self._parts.clear()
        self._held_bytes = 0
        return [piece]


class Sink:
    """Where prefixed lines go: a terminal, a pipe or a file that this process has open.

    Args:
        fd: The open descriptor, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False
        self._may_block = True
        self.terminal = os.isatty(fd)
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._owner: object = None  # whose unfinished line the cursor stands behind
        try:
            self._may_block = not stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:  # the descriptor was closed before we started
            self.broken = True
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for the reader to take more."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be put in."""
        return self._queued_bytes >= _QUEUE_BYTES

    def put(self, pieces: Iterable[tuple[object, bytes, Piece]]) -> None:
        """Queue pieces of output, each as (owner, prefix, piece); `owner` stands for its pipe."""
        out: list[bytes] = []
        now = self._owner
        for owner, prefix, (text, ends) in pieces:
            if now is not owner:
                if now is not None:
                    out.append(b"\n")
                out.append(prefix)
            out.append(text if b"\r" not in text else self._body(text, prefix))
            if ends:
                out.append(b"\n")
                now = None
            else:
                now = owner
        self._owner = now
        self._push(b"".join(out))

    def say(self, text: str) -> None:
        """Queue lines of the launcher's own, on lines of their own."""
        if self._owner is not None:
            text = "\n" + text
            self._owner = None
        self._push(text.encode(errors="backslashreplace") + b"\n")

    def finish(self) -> None:
        """Leave the cursor at the start of a line."""
        if self._owner is not None:
            self._owner = None
            self._push(b"\n")

    def write_some(self) -> None:
        """Write as much as can be written without waiting."""
        while self._queue and not self.broken and self._ready(0):
            self._write_chunk()

    def drain(self, timeout_s: float) -> None:
        """Write everything, waiting at most `timeout_s` for each chunk to be taken."""
        while self._queue and not self.broken and self._ready(timeout_s):
            self._write_chunk()

    def _body(self, text: bytes, prefix: bytes) -> bytes:
        if not self.terminal:
            return text
        head, last = text[:-1], text[-1:]  # a last \r may belong to \r\n
        return head.replace(b"\r", b"\r" + prefix) + last

    def _push(self, data: bytes) -> None:
        if data and not self.broken:
            self._queue.append(memoryview(data))
            self._queued_bytes += len(data)

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
        except OSError:  # nobody reads any more
            self.broken = True
            self._queue.clear()
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
