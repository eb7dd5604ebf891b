"""The job's log as one agent knows it: what the past has come to, and the latest entries.

A machine is a function of all events, but also of a machine that was fed with the older ones and of
the rest. So an agent keeps, in place of the whole log, a *past* (such a machine) and the entries
from there on, and so does the store:

    number      0 ............ start ........................ end
                └─ the past ─┘└─ entries, `_KEEP` at least ─┘
                  one machine     as they were written

Every time the entries have become twice as many as must be kept, the older half goes into the past
(`fold`). All agents read the same log, so all of them have the same past at the same number, and
whoever comes to know of it first may write it down (`journal`).

**What counts.** An entry has an author, and a number of his own: 1, 2, 3, and so on. It counts if
its author's last one that counted had the number before it; otherwise it means nothing. So an
author who does not know whether an entry has arrived may write it again, and what he said later
cannot be heard before what he said earlier. How far each author has come is part of the past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from dure.errors import StoreError
from dure.launch.agent.events import Event, pack_event, read_event
from dure.launch.agent.machine import Machine

__all__ = ["Chronicle", "pack_entry"]

_KEEP = 512
"""How many entries are kept as they are, at least; so many may an agent be behind the others
before it has to start from the past."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """A line of the log; what somebody says who has no other lines has no author."""

    author: str
    number: int
    event: bytes


class _Past(msgspec.Struct, array_like=True, frozen=True):
    """What all entries before `start` have come to: the machine, and each author's last number."""

    start: int
    counts: dict[str, int]
    machine: bytes


_pack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(_Entry).decode
_read_past = msgspec.msgpack.Decoder(_Past).decode
_NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError)


def pack_entry(event: Event, author: str = "", number: int = 0) -> bytes:
    """Return a line of the log."""
    return _pack(_Entry(author, number, pack_event(event)))


class Chronicle:
    """A past, and the entries since.

    Args:
        make: Makes the machine of a job to which nothing has happened.
        past: What `pack_past` returned; None: the log begins.
        keep: How many entries are kept, at least.

    Raises:
        StoreError: `past` is none.

    Attributes:
        start: The number of the first entry that is kept.
    """

    def __init__(
        self, make: Callable[[], Machine], past: bytes | None = None, keep: int = _KEEP
    ) -> None:
        self._make, self._keep = make, keep
        self._past = make()
        self.start = 0
        self._before: dict[str, int] = {}
        if past is not None:
            try:
                read = _read_past(past)
                self._past = msgspec.msgpack.decode(read.machine, type=type(self._past))
            except _NO_MESSAGE as error:
                _refuse("a past", error)
            self.start, self._before = read.start, read.counts
        self._counts = dict(self._before)
        self._entries: list[tuple[bytes, Event | None]] = []

    @property
    def end(self) -> int:
        """The number of the next entry."""
        return self.start + len(self._entries)

    def add(self, packed: bytes) -> Event | None:
        """Take the next entry; return its event if it counts.

        Raises:
            StoreError: It is no entry; nothing was taken.
        """
        try:
            entry = _read(packed)
            event = read_event(entry.event) if self._is_next(entry) else None
        except _NO_MESSAGE as error:
            _refuse("an entry", error)
        if event is not None and entry.author:
            self._counts[entry.author] = entry.number
        self._entries.append((packed, event))
        return event

    def _is_next(self, entry: _Entry) -> bool:
        return not entry.author or entry.number == self.heard(entry.author) + 1

    def heard(self, author: str) -> int:
        """Return the number of an author's last entry that counts; 0 if there is none."""
        return self._counts.get(author, 0)

    def buried(self, author: str) -> int:
        """Return the number of an author's last entry that is part of the past."""
        return self._before.get(author, 0)

    def events(self, number: int) -> list[Event]:
        """Return what has happened from a number on, which is not before `start`."""
        return [event for _, event in self._entries[number - self.start :] if event is not None]

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield all entries that are kept, with their numbers."""
        for number, (packed, _) in enumerate(self._entries, self.start):
            yield number, packed

    def past(self) -> Machine:
        """Return a machine, the caller's own, which has seen all before `start`."""
        return msgspec.msgpack.decode(_pack(self._past), type=type(self._past))

    def pack_past(self) -> bytes:
        """Return the past as plain data."""
        return _pack(_Past(self.start, self._before, _pack(self._past)))

    def fold(self) -> bool:
        """Put the older entries into the past, if there are many; tell whether there were.

        In a job of many hosts each thing that happens has many entries: more of them are kept.
        """
        keep = max(self._keep, 8 * len(self._past.agents))
        if len(self._entries) < 2 * keep:
            return False
        for packed, event in self._entries[:keep]:
            if event is not None:
                self._past.apply(event)
                entry = _read(packed)
                if entry.author:
                    self._before[entry.author] = entry.number
        del self._entries[:keep]
        self.start += keep
        return True


def _refuse(what: str, error: Exception) -> NoReturn:
    raise StoreError(
        f"the job's log holds {what} that cannot be read",
        seen=str(error),
        fix="Use one version of Dure on all hosts, and one endpoint for each job.",
    ) from None
