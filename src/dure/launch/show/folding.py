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
from operator import attrgetter

from dure.launch.spec import Stream

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "WINDOW_S", "Entry", "Folder", "rank_set"]

WINDOW_S = 0.1
MAX_BYTES = 1 << 20
MAX_ENTRIES = 8192
_number = attrgetter("number")
_LONGEST = 1 << 14  # bytes of a line, or of a traceback, that may fold


class Entry:
    """A line on its way, and the ranks that wrote it (a bit each).

    `ends` says that its newline followed, `alike` is where those lie that may be joined, if it may.
    """

    __slots__ = ("alike", "at", "ends", "number", "owner", "ranks", "text")

    def __init__(self, number: int, rank: int, owner: object, text: bytes, at: float) -> None:
        self.number = number
        self.ranks = 1 << rank
        self.owner = owner
        self.text = text
        self.at = at
        self.ends = True
        self.alike: dict[bytes, deque[Entry]] | None = None


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
        self._alike: dict[Stream, dict[bytes, deque[Entry]]] = {"stdout": {}, "stderr": {}}
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
        alike, last = self._alike[stream], self._last.get(rank, 0)
        goes_on = owner in self._open  # the first is the end of a line that was shown in part
        self._open.discard(owner)
        for text in lines:
            same = alike.get(text)
            if same is not None and not goes_on and same[-1].number > last:
                entry = same[bisect_right(same, last, key=_number)]
                entry.ranks |= 1 << rank
                last = entry.number
                continue
            entry = self._append(owner, rank, text, now)
            last = entry.number
            if goes_on or len(text) > _LONGEST:
                goes_on = False
                continue
            entry.alike = alike
            if same is None:
                alike[text] = deque((entry,))
            else:
                same.append(entry)
        self._last[rank] = last
        return self.due(now)

    def put_part(self, owner: object, rank: int, text: bytes, now: float) -> list[Entry]:
        """Take some of a pipe's line, whose end has not come; return what must leave at once."""
        entry = self._append(owner, rank, text, now)
        entry.ends = False
        self._last[rank] = entry.number
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
        entry = Entry(self._next, rank, owner, text, now)
        self._queue.append(entry)
        self._queued_bytes += len(text)
        self._next += 1
        return entry

    def _take(self, count: int) -> list[Entry]:
        taken = [self._queue.popleft() for _ in range(count)]
        for entry in taken:
            self._queued_bytes -= len(entry.text)
            if entry.alike is not None:  # nothing may join it now; it is the oldest
                same = entry.alike[entry.text]
                same.popleft()
                if not same:
                    del entry.alike[entry.text]
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
