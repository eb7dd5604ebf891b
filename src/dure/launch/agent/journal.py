"""The job's log in its store: how entries are added, read, and made to be the past.

    dure/agents/log/N     entry N: written once, by compare-and-set on a key that is not there
    dure/agents/cut       the number of the first entry that is kept; none yet: 0
    dure/agents/past/N    what the entries before N have come to (`chronicle`)

**Adding.** A writer offers its entry for number N, and where somebody else was first, for the next.

**Making it the past** (`bury`). Whoever holds the store writes `past/N`, moves the cut to N, and
removes the entries before N, in this order. The cut only grows, and only by compare-and-set. Two
who do this at once for the same N write the same; of two numbers the greater stays.

**Holes.** Where an entry was removed, a writer who is behind finds no key, and writes his own: into
a hole. Nobody may take that for the entry that was there. So who has read entries, or has written
one, looks at the cut *afterwards*. If it is not behind his number, his number was never a hole,
for the cut only grows. If it is, a reader throws away what he has read and starts from the past,
and a writer removes his entry and writes it again, at the cut. Perhaps it was no hole, and the
entry part of the past already: then the second one does not count (`chronicle`).

Cost: two round trips to write an entry, and to read it one, or 1/32 where there are many; burying N
entries takes N + 5, once in N.
"""

from __future__ import annotations

from dure.errors import StoreLost, StoreTimeout
from dure.launch.agent.chronicle import Chronicle, pack_entry
from dure.launch.agent.events import Event
from dure.store.base import Store

__all__ = ["append", "bury", "entry_key", "fetch", "is_behind", "seed", "write_once"]

_LOG = "dure/agents/log"
_CUT = "dure/agents/cut"
_PAST = "dure/agents/past"
_NOTHING = b"-"
"""No value of these keys."""

_MUCH, _AT_ONCE = 8, 64
"""After so many entries in a row, so many are asked for at once."""


def entry_key(number: int) -> str:
    """Return where an entry is."""
    return f"{_LOG}/{number}"


def write_once(store: Store, event: Event) -> None:
    """Write an event into the log for one who does not follow it."""
    append(store, _cut(store), pack_entry(event))


def append(store: Store, number: int, entry: bytes) -> None:
    """Put an entry at the end of the log, which is at `number` or behind it."""
    while True:
        while store.compare_set(entry_key(number), "", entry) != entry:
            number += 1
        cut = _cut(store)
        if cut <= number:
            return
        store.delete_key(entry_key(number))
        number = cut


def fetch(store: Store, number: int) -> tuple[bytes | None, list[bytes]]:
    """Return the entries from a number on; if they are past, that past and all entries since.

    Raises:
        StoreLost: The store is not whole.
    """
    past: bytes | None = None
    tried = number
    while True:
        entries = _entries(store, number)
        cut = _cut(store)
        if cut <= number:
            return past, entries
        if cut == tried:
            raise StoreLost("the job's log has lost its beginning", seen=f"no {_PAST}/{cut}")
        tried = cut
        found = _look(store, f"{_PAST}/{cut}")
        if found is not None:  # otherwise the cut has moved on
            past, number = found, cut


def _entries(store: Store, number: int) -> list[bytes]:
    """Return what is there from a number on: one by one, and where that is much, by many."""
    entries: list[bytes] = []
    while True:
        keys = [entry_key(number + len(entries) + ahead) for ahead in range(_AT_ONCE)]
        if len(entries) >= _MUCH and store.check(keys):
            try:
                entries += store.multi_get(keys)
            except StoreTimeout:  # removed meanwhile: the cut is ahead of us
                return entries
        elif (entry := _look(store, keys[0])) is not None:
            entries.append(entry)
        else:
            return entries


def is_behind(store: Store, number: int) -> bool:
    """Tell whether the entry with this number is part of the past."""
    return _cut(store) > number


def bury(store: Store, chronicle: Chronicle) -> None:
    """Make the entries before `chronicle.start` the past."""
    start = chronicle.start
    store.set(f"{_PAST}/{start}", chronicle.pack_past())
    while (before := _cut(store)) < start:
        expected = b"%d" % before if before else b""
        store.compare_set(_CUT, expected, b"%d" % start)
        if _cut(store) >= start:
            _remove(store, before, start)
    if before > start:  # somebody else was faster
        store.delete_key(f"{_PAST}/{start}")


def _remove(store: Store, before: int, start: int) -> None:
    for number in range(before, start):
        store.delete_key(entry_key(number))
    store.delete_key(f"{_PAST}/{before}")
    while before > 0 and store.delete_key(entry_key(before - 1)):  # left by one who died doing this
        before -= 1


def seed(store: Store, chronicle: Chronicle) -> None:
    """Write a log into a store that has none, and that nobody else uses yet."""
    if chronicle.start:
        store.set(f"{_PAST}/{chronicle.start}", chronicle.pack_past())
        store.set(_CUT, b"%d" % chronicle.start)
    for number, entry in chronicle.entries():
        store.set(entry_key(number), entry)


def _cut(store: Store) -> int:
    return int(_look(store, _CUT) or b"0")


def _look(store: Store, key: str) -> bytes | None:
    """Return a value, or None if there is none, in one step."""
    value = store.compare_set(key, _NOTHING, _NOTHING)
    return None if value == _NOTHING else value
