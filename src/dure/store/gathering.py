"""Gathering: ranks exchange values through a store, and each rank reads one value.

Each rank writes an *entry* and counts itself. The last one by that count reads all entries, makes a
*summary* of them and publishes it. The others wait for the summary. So a rank has a fixed number of
requests, and reads what the summary holds: all entries, or only what follows from them.

Three things may go wrong, and none of them costs every rank a look at all entries:

* A rank does not come. At its limit each rank asks once which entries are missing.
* The last rank ends or hangs before it has published. So a rank that has waited for `_DOUBT_S`, and
  after that at growing intervals, asks for the count; if all have come it makes the summary itself.
  The first summary counts.
* A rank comes when others have given up. These have withdrawn: each removes itself from the count
  and marks its entry, so that others who give up later do not name it as missing. Whether all had
  come is decided by the count alone, never by entries, which may be those of an earlier attempt.

A name may be used again: every `size` arrivals form one gathering.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec

from dure.errors import StoreError, StoreTimeout
from dure.store.base import Store

__all__ = ["Gathering", "gather", "gather_all", "wait_for_summaries"]

_DOUBT_S = 5.0
"""After how long a rank that waits asks for the first time whether all have come."""

_WITHDRAWN = b"\xc1withdrawn"
"""The entry of a rank that has withdrawn; no value in msgpack begins so."""

_pack = msgspec.msgpack.encode
_read_entries = msgspec.msgpack.Decoder(list[bytes]).decode


class Gathering:
    """One rank's part of a gathering.

    Args:
        store: Shared by the ranks.
        name: Name of the gathering, the same on all ranks. Its keys begin with it.
        rank: This rank, from 0 to `size` - 1.
        size: How many ranks there are.
        summarize: Makes the summary, which must not be empty, of the entries of all ranks.

    Attributes:
        summary: The summary; None if it is not known yet.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        summarize: Callable[[list[bytes]], bytes] = _pack,
    ) -> None:
        self._store, self._name, self._rank, self.size = store, name, rank, size
        self._summarize = summarize
        self._number = 0
        self._counted = self._out = False
        self.summary: bytes | None = None

    def entry_key(self, rank: int) -> str:
        """Return the key of a rank's entry."""
        return f"{self._name}/member/{rank}"

    @property
    def key(self) -> str:
        """The key of the summary, once this rank has arrived."""
        return f"{self._name}/all/{self._number}"

    @property
    def _end(self) -> int:
        """The count when all ranks have come."""
        return (self._number + 1) * self.size

    def arrive(self) -> None:
        """Count this rank, whose entry is in the store; the last one publishes the summary."""
        count = self._store.add(f"{self._name}/count", 1)
        self._counted = True
        self._number = (count - 1) // self.size
        if count == self._end:
            self.conclude()

    def all_came(self) -> bool:
        """Ask whether all ranks have come."""
        return self._store.add(f"{self._name}/count", 0) >= self._end

    def conclude(self) -> None:
        """Make the summary and publish it, unless there is one; all ranks have been counted.

        If two ranks have the same number, an entry is missing, and there will be no summary.
        """
        keys = [self.entry_key(rank) for rank in range(self.size)]
        if not self._store.check(keys):
            return
        entries = self._store.multi_get(keys)
        if _WITHDRAWN not in entries:
            self.publish(self._summarize(entries))

    def publish(self, summary: bytes) -> None:
        """Publish a summary, unless there is one."""
        self.summary = self._store.compare_set(self.key, "", summary)

    def missing(self) -> tuple[int, ...]:
        """Ask which ranks have not come; if all have entries, which of these have withdrawn."""
        keys = {self.entry_key(rank): rank for rank in range(self.size)}
        absent = self._store.missing_keys(list(keys))
        if absent:
            return tuple(keys[key] for key in absent)
        entries = self._store.multi_get(list(keys))
        return tuple(rank for rank, entry in enumerate(entries) if entry == _WITHDRAWN)

    def withdraw(self) -> bool:
        """Take this rank out, unless all have come; return whether it is out."""
        if self._counted:
            if self._store.add(f"{self._name}/count", -1) >= self._end - 1:
                self._store.add(f"{self._name}/count", 1)
                return False
            self._counted = False
        self._out = True
        self._store.set(self.entry_key(self._rank), _WITHDRAWN)
        return True

    def give_up(self) -> None:
        """Withdraw after an error, also if the store is lost."""
        if self.summary is None and not self._out:
            with suppress(StoreError):
                self.withdraw()


def wait_for_summaries(
    store: Store,
    gatherings: Sequence[Gathering],
    limit: timedelta,
    watch: Callable[[], float] | None = None,
) -> tuple[Gathering, tuple[int, ...]] | None:
    """Wait until all `gatherings`, at which this rank has arrived, have their summaries.

    Args:
        store: Of the gatherings.
        gatherings: To wait for.
        limit: How long to wait.
        watch: Called before each wait; returns how long that may take at most, in seconds.

    Returns:
        None, or at the limit the first gathering to which ranks have not come, and those ranks.
    """
    began = time.monotonic()
    deadline, doubt_s = began + limit.total_seconds(), _DOUBT_S
    while True:
        waiting = {g.key: g for g in gatherings if g.summary is None}
        if not waiting:
            return None
        end = min(deadline, began + doubt_s)
        if watch is not None:
            end = min(end, time.monotonic() + watch())
        try:
            store.wait(list(waiting), timedelta(seconds=end - time.monotonic()))
        except StoreTimeout:
            pass
        else:
            for g, summary in zip(waiting.values(), store.multi_get(list(waiting)), strict=True):
                g.summary = summary
            return None
        now = time.monotonic()
        for g in waiting.values():
            if now >= deadline:
                missing = g.missing()
                if not g.all_came() and g.withdraw():
                    return g, missing
                if missing and (missing := g.missing()):
                    return g, missing
                g.conclude()
            elif now >= began + doubt_s and g.all_came():
                g.conclude()
        if now >= began + doubt_s:
            doubt_s *= 2


def gather(
    store: Store,
    name: str,
    rank: int,
    size: int,
    entry: str | bytes,
    limit: timedelta,
    summarize: Callable[[list[bytes]], bytes] = _pack,
) -> bytes:
    """Exchange an entry; return the summary, by default the packed list of all entries.

    Args:
        store: Shared by the ranks; the keys begin with `name`.
        name: As for `Gathering`; also the other arguments.
        rank: This rank.
        size: How many ranks there are.
        entry: This rank's.
        limit: How long to wait for the other ranks.
        summarize: Makes the summary of all entries.

    Raises:
        StoreTimeout: A rank did not come; its `keys` are the missing entries.

    Collective:
        All ranks call.

    Cost:
        4 requests to the store, and the bytes of the summary. The last rank to come has 5, and
        reads the entries of all.
    """
    gathering, began = Gathering(store, name, rank, size, summarize), time.monotonic()
    try:
        store.set(gathering.entry_key(rank), entry)
        gathering.arrive()
        late = wait_for_summaries(store, [gathering], limit)
        if late is not None:
            keys = tuple(gathering.entry_key(r) for r in late[1])
            raise StoreTimeout(
                "keys did not appear in time",
                op="wait",
                keys=keys,
                elapsed_s=time.monotonic() - began,
                seen=f"no process has set {', '.join(map(repr, keys))}",
            )
    except BaseException:
        gathering.give_up()
        raise
    assert gathering.summary is not None
    return gathering.summary


def gather_all(
    store: Store, name: str, rank: int, size: int, entry: str | bytes, limit: timedelta
) -> list[bytes]:
    """Exchange an entry; return those of all ranks. Otherwise as `gather`."""
    return _read_entries(gather(store, name, rank, size, entry, limit))
