"""The same line from many ranks, shown once, and the prefix that says which ranks wrote it.

Ranks mostly print the same thing at the same time. A `LineFolder` holds each line back for a
moment, the *window*, and lets other ranks' equal lines join it: `[0-3] epoch 2`.

Lines wait in one queue, as *entries*: a text, and the ranks that wrote it. A line of rank r joins
the first entry with its text behind r's last entry; if there is none, it begins an entry. So a
rank's lines are always shown in the order in which it wrote them. An entry leaves
once every rank is in it, or when its window is over; if too many wait, the oldest leave early.

Folded line by line, different tracebacks of two ranks would come under one header. So the lines of
a traceback, from its header to the line that names the error, go through the folder as one text.

`[3] ` is rank 3, `[0-2,5] ` are four ranks that wrote the same line, `[node7:3] ` is rank 3 on the
host node7. A single rank's prefix is padded to one width, so that lines are aligned.

Cost:
    About 1 us of processor time per line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from dure.launch.spec import Stream

__all__ = ["WINDOW_S", "Entry", "LineFolder", "Prefixes", "Tracebacks", "rank_set"]

WINDOW_S = 0.1
MAX_BYTES = 1 << 20
MAX_ENTRIES = 8192
_number = attrgetter("number")
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_MANY = 1  # bold

_HEADER = b"Traceback (most recent call last):"
_LONGEST = 1000  # lines that are kept together


@dataclass(slots=True, eq=False)
class Entry:
    """A line on its way, and the ranks that wrote it (a bit each)."""

    number: int
    ranks: int
    owner: object
    key: tuple[Stream, bytes]
    at: float

    @property
    def text(self) -> bytes:
        """The line; or several, with line breaks between them."""
        return self.key[1]


class LineFolder:
    def __init__(self, ranks: Iterable[int], window_s: float = WINDOW_S) -> None:
        self._all = sum(1 << rank for rank in ranks)
        self._window_s = window_s
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._next = 1
        self._last: dict[int, int] = {}  # rank to the number of its last entry
        self._alike: dict[tuple[Stream, bytes], deque[Entry]] = {}

    @property
    def wake_at(self) -> float | None:
        return self._queue[0].at + self._window_s if self._queue else None

    def put(
        self, owner: object, rank: int, stream: Stream, lines: list[bytes], now: float
    ) -> list[Entry]:
        """Take complete lines of a local rank's pipe; return the entries that must leave at once.

        `owner` identifies the pipe; lines of different streams never fold together.
        """
        last = self._last.get(rank, 0)
        for text in lines:
            key = (stream, text)
            same = self._alike.get(key)
            if same is not None and same[-1].number > last:
                entry = same[bisect_right(same, last, key=_number)]
                entry.ranks |= 1 << rank
                last = entry.number
                continue
            entry = Entry(self._next, 1 << rank, owner, key, now)
            self._alike.setdefault(key, deque()).append(entry)
            self._queue.append(entry)
            self._queued_bytes += len(text)
            last = self._next
            self._next += 1
        self._last[rank] = last
        return self.due(now)

    def due(self, now: float) -> list[Entry]:
        """Take from the front what is complete, too old, or too much."""
        out: list[Entry] = []
        while self._queue and (
            self._queue[0].ranks == self._all
            or self._queue[0].at + self._window_s <= now
            or len(self._queue) > MAX_ENTRIES
            or self._queued_bytes > MAX_BYTES
        ):
            entry = self._queue.popleft()
            self._queued_bytes -= len(entry.text)
            same = self._alike[entry.key]
            same.popleft()  # it is the oldest
            if not same:
                del self._alike[entry.key]
            out.append(entry)
        return out

    def flush(self) -> list[Entry]:
        return self.due(float("inf"))


def rank_set(ranks: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


class Prefixes:
    """The prefixes of this host's ranks.

    `first_rank` is the rank of local rank 0; `world_size` sets the width; `host` is to be shown.
    """

    def __init__(
        self, first_rank: int, world_size: int, host: str | None = None, shown: bool = True
    ) -> None:
        self._first = first_rank
        self._width = len(str(world_size - 1))
        self._host = "" if host is None else f"{host.partition('.')[0]}:"
        self._shown = shown
        self.of = lru_cache(4096)(self._make)  # sets are many: 2 to the power of ranks

    def _make(self, bits: int, colour: bool) -> bytes:
        """Return the prefix of a set of local ranks; bit i of it is local rank i."""
        if not self._shown:
            return b""
        ranks = [self._first + i for i in range(bits.bit_length()) if bits >> i & 1]
        single = len(ranks) == 1
        who = f"{ranks[0]:>{self._width}}" if single else rank_set(ranks)
        code = _COLOURS[ranks[0] % len(_COLOURS)] if single else _MANY
        begin, end = (f"\x1b[{code}m", "\x1b[0m") if colour else ("", "")
        return f"{begin}[{self._host}{who}] {end}".encode()


class Tracebacks:
    """Joins the lines of a traceback into one text; `owner` identifies the pipe."""

    def __init__(self) -> None:
        self._held: dict[object, list[bytes]] = {}

    def holds(self, owner: object) -> bool:
        """Whether a traceback has begun, and not ended."""
        return owner in self._held

    def release(self, owner: object) -> list[bytes]:
        """Return the lines that are held back, one by one."""
        return self._held.pop(owner, [])

    def gather(self, owner: object, lines: list[bytes]) -> list[bytes]:
        """Return lines, in which a traceback is one text with line breaks in it."""
        if owner not in self._held and _HEADER not in lines:
            return lines
        out: list[bytes] = []
        for line in lines:
            held = self._held.get(owner)
            if held is None and line == _HEADER:
                self._held[owner] = [line]
            elif held is None:
                out.append(line)
            else:
                held.append(line)
                if not line.startswith(b" ") or len(held) > _LONGEST:
                    out.append(b"\n".join(self.release(owner)))
        return out
