"""The same line from many ranks, shown once.

Ranks mostly say the same thing at the same time. A `Folder` holds each line back for a moment, the
*window*, and lets other ranks' equal lines join it: `[0-3] epoch 2`.

Lines wait in one queue, as *entries*: a text, and the ranks that wrote it. Entries are numbered in
the order in which they were begun, and leave in that order. A line of rank r joins the first entry
with its text whose number is above that of r's last entry; if there is none, it begins an entry.
So the numbers of a rank's entries only grow, and its lines are shown in the order in which it wrote
them, whatever joins what. An entry leaves once every rank is in it, or when its window is over, and
is never behind one that would leave later: no line waits longer than the window.

What is no whole line (a prompt, a progress bar, and what continues it) waits its turn in the queue,
and neither joins nor is joined. So do very long lines. When more waits than `MAX_BYTES` or
`MAX_ENTRIES`, the oldest leave early, so memory is bounded whatever the ranks write.

Cost: about 1 us a line of processor time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from dure.launch.spec import Stream

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "WINDOW_S", "Entry", "Folder", "rank_set"]

WINDOW_S = 0.1
MAX_BYTES = 1 << 20
MAX_ENTRIES = 8192
_LONGEST = 1 << 14  # bytes of a line, or of a traceback, that may fold


@dataclass(slots=True, eq=False)
class Entry:
    """A line on its way, and the ranks that wrote it (a bit each); `ends`: its newline followed."""

    number: int
    ranks: int
    owner: object
    text: bytes
    at: float
    ends: bool = True


class Folder:
    """The lines of many ranks on their way to one place.

    Args:
        ranks: The local ranks, whose lines may fold.
        window_s: How long a line may wait for others.
    """

    def __init__(self, ranks: Iterable[int], window_s: float = WINDOW_S) -> None:
        self._all = sum(1 << rank for rank in ranks)
        self._window_s = window_s
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._next = 1
        self._last: dict[int, int] = {}  # rank to the number of its last entry
        self._same: dict[tuple[Stream, bytes], deque[Entry]] = {}  # what may be joined
        self._open: set[object] = set()  # pipes whose line was shown in part

    @property
    def wake_at(self) -> float | None:
        """When `due` has something to give."""
        return self._queue[0].at + self._window_s if self._queue else None

    def put(
        self, owner: object, rank: int, stream: Stream, lines: list[bytes], now: float
    ) -> list[Entry]:
        """Take whole lines of one pipe, and return what must leave at once.

        Args:
            owner: Stands for the pipe.
            rank: The local rank that writes into it.
            stream: Which of its streams; lines of different ones never fold together.
            lines: What it brought.
            now: The time.
        """
        for text in lines:
            may_fold = len(text) <= _LONGEST and owner not in self._open
            self._open.discard(owner)
            same = self._same.get((stream, text)) if may_fold else None
            last = self._last.get(rank, 0)
            if same and same[-1].number > last:
                entry = same[bisect_right(same, last, key=attrgetter("number"))]
                entry.ranks |= 1 << rank
                self._last[rank] = entry.number
                continue
            entry = self._append(owner, rank, text, now)
            if may_fold:
                self._same.setdefault((stream, text), deque()).append(entry)
        return self.due(now)

    def put_part(self, owner: object, rank: int, text: bytes, now: float) -> list[Entry]:
        """Take some of a pipe's line, whose end has not come; return what must leave at once."""
        self._append(owner, rank, text, now).ends = False
        self._open.add(owner)
        return self.due(now)

    def due(self, now: float) -> list[Entry]:
        """Take from the front what is complete, too old, or too much."""
        early: list[Entry] = []
        while len(self._queue) > MAX_ENTRIES or self._queued_bytes > MAX_BYTES:
            early += self._take((len(self._queue) + 1) // 2)
        count = 0
        for entry in self._queue:
            if entry.at + self._window_s > now and entry.ranks != self._all and entry.ends:
                break
            count += 1
        return early + self._take(count)

    def flush(self) -> list[Entry]:
        """Return all that waits."""
        return self._take(len(self._queue))

    def _append(self, owner: object, rank: int, text: bytes, now: float) -> Entry:
        entry = Entry(self._next, 1 << rank, owner, text, now)
        self._queue.append(entry)
        self._queued_bytes += len(text)
        self._last[rank] = self._next
        self._next += 1
        return entry

    def _take(self, count: int) -> list[Entry]:
        taken = [self._queue.popleft() for _ in range(count)]
        for entry in taken:
            self._queued_bytes -= len(entry.text)
            for stream in ("stdout", "stderr"):
                same = self._same.get((stream, entry.text))
                if same and same[0] is entry:  # nothing may join it now; it is the oldest
                    same.popleft()
                    if not same:
                        del self._same[stream, entry.text]
        return taken


def rank_set(ranks: Iterable[int]) -> str:
    """Write ranks as a node set does, such as `0-2,5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
