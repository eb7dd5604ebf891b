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

Cost: about 1 us a line of processor time; while lines come in a flood of which little folds, the
folder steps aside and lines pass at once.
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
_LONGEST = 4096  # bytes of a line that may fold
_FLOOD = 2000  # lines in a window that nobody can read
_TRY_EVERY = 16  # windows of a flood, until it is seen again whether it folds

_number = attrgetter("number")


class Entry:
    """A line on its way, and the ranks that wrote it; `ends` says that its newline followed."""

    __slots__ = ("at", "ends", "number", "owner", "ranks", "text")

    def __init__(self, number: int, rank: int, owner: object, text: bytes, at: float) -> None:
        self.number = number
        self.ranks = 1 << rank
        self.owner = owner
        self.text = text
        self.at = at
        self.ends = True


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
        self._entries: dict[Stream, dict[bytes, deque[Entry]]] = {"stdout": {}, "stderr": {}}
        self._open: set[object] = set()  # pipes whose line was shown in part
        self._lines, self._joined, self._since = 0, 0, 0.0
        self._aside, self._num_aside = False, 0

    @property
    def wake_at(self) -> float | None:
        """When `due` has something to give."""
        return self._queue[0].at + self._window_s if self._queue else None

    @property
    def aside(self) -> bool:
        """Whether lines should pass by, behind what `flush` returns: see `watch`."""
        return self._aside

    def watch(self, num_lines: int, now: float) -> None:
        """Count lines that come: step aside in a flood of which little folds, now and then not."""
        if now - self._since > self._window_s:
            flood = self._lines > _FLOOD
            if self._aside:
                self._num_aside += 1
                self._aside = flood and self._num_aside % _TRY_EVERY != 0
            else:
                self._aside = flood and self._joined * 4 < self._lines
            self._lines, self._joined, self._since = 0, 0, now
        self._lines += num_lines

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
        entries, last = self._entries[stream], self._last.get(rank, 0)
        bit, first = 1 << rank, owner in self._open
        self._open.discard(owner)
        for text in lines:
            same = entries.get(text)
            entry = None if same is None or first else _first_after(same, last)
            if entry is not None:
                entry.ranks |= bit
                last = entry.number
                self._joined += 1
                continue
            entry = Entry(self._next, rank, owner, text, now)
            last = self._append(entry)
            if first or len(text) > _LONGEST:  # the end of a line that was shown in part
                first = False
            elif same is None:
                entries[text] = deque((entry,))
            else:
                same.append(entry)
        self._last[rank] = last
        return self.due(now)

    def put_part(self, owner: object, rank: int, text: bytes, now: float) -> list[Entry]:
        """Take some of a pipe's line, whose end has not come; return what must leave at once."""
        entry = Entry(self._next, rank, owner, text, now)
        entry.ends = False
        self._open.add(owner)
        self._last[rank] = self._append(entry)
        return self.due(now)

    def due(self, now: float) -> list[Entry]:
        """Take from the front what is complete, too old, or too much."""
        queue, count, window_s = self._queue, 0, self._window_s
        early: list[Entry] = []
        while len(queue) > MAX_ENTRIES or self._queued_bytes > MAX_BYTES:
            early += self._take((len(queue) + 1) // 2)
        if early:
            return early
        for entry in queue:
            if entry.at + window_s > now and entry.ranks != self._all and entry.ends:
                break
            count += 1
        return self._take(count)

    def flush(self) -> list[Entry]:
        """Return all that waits."""
        return self._take(len(self._queue))

    def _append(self, entry: Entry) -> int:
        self._queue.append(entry)
        self._queued_bytes += len(entry.text)
        self._next += 1
        return entry.number

    def _take(self, count: int) -> list[Entry]:
        queue = self._queue
        if count == len(queue):
            taken = list(queue)
            queue.clear()
            self._queued_bytes = 0
            for entries in self._entries.values():
                entries.clear()
            return taken
        taken = [queue.popleft() for _ in range(count)]
        for entry in taken:
            self._queued_bytes -= len(entry.text)
            self._forget(entry)
        return taken

    def _forget(self, entry: Entry) -> None:
        """Let nothing join an entry that leaves; it is the oldest of its text."""
        text = entry.text
        for entries in self._entries.values():
            same = entries.get(text)
            if same is not None and same[0] is entry:
                same.popleft()
                if not same:
                    del entries[text]


def _first_after(same: deque[Entry], last: int) -> Entry | None:
    """Return the first entry of a text whose number is above `last`."""
    if same[0].number > last:
        return same[0]
    if same[-1].number <= last:
        return None
    return same[bisect_right(same, last, key=_number)]


def rank_set(ranks: Iterable[int]) -> str:
    """Write ranks as a node set does, such as `0-2,5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
