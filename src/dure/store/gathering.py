"""Gathering: ranks exchange values through a store, and all of them learn one verdict.

Each rank counts itself, and then writes an *entry*. The last one by that count reads all entries,
makes a *summary* of them and publishes it in the *verdict*. The others wait for the verdict. So a
rank has a fixed number of requests, and reads what the summary holds: all entries, or only what
follows from them.

There is one verdict, which is set once (by compare-and-set), and every rank follows it:

* *complete*, with the summary;
* *missing*: a rank has reached its limit before all had come. It first *closes* the gathering, by
  compare-and-set of the count, so that the count is either complete or closed and never both. Then
  it reads which entries are missing. No other rank does;
* *lost* or *failed*: a rank has noticed that the process of another one has ended, or has left
  because something else failed or it was interrupted. The others do not wait for it;
* *again*: the count is complete, and an entry is missing. A rank has ended between its count and
  its entry, or a process that replaces a rank was counted, too. All ranks repeat the gathering,
  once and with a new count: then the rank that does not come is missing.

A rank may end or hang before it has published the verdict. So the others ask for the count at
growing intervals, the first one by the count first, and publish what follows from it.

A name may be used several times, unless it is used *once*. Each attempt has its own number and
keys. A rank that comes to an attempt whose count is complete or closed takes part in the next one.
If the name is used once there is none, and the rank follows the verdict, although it was late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Any

import msgspec

from dure.errors import PeerLost, RendezvousError, RendezvousTimeout, StoreError, StoreTimeout
from dure.store.base import Store

__all__ = ["Gathering", "Verdict", "gather", "gather_all", "reason_of", "wait_for_verdicts"]

_DOUBT_S = 5.0
"""After how long the first rank that waits asks for the first time whether all have come."""

_WRITE_S = 10.0
"""How long a rank that has been counted may take to write its entry, in a busy store."""

_SLICE_S = 1.0
"""How often a rank that waits for entries looks whether another one has published a verdict."""

_GRACE_S = 1.0
"""How long ranks that reach their limit wait for the verdict of the rank that was first; a multiple
of it, so that few of many ranks read which entries are missing."""

_LOOK_S = 5.0
"""How often, at least, a rank with several gatherings looks whether one of them has failed."""

_CLOSED = 1 << 32
"""A count that is at least this large is closed."""

_WHY_CHARS = 500

_pack = msgspec.msgpack.encode
_read_entries = msgspec.msgpack.Decoder(list[bytes]).decode


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """How a gathering has ended, for all its ranks.

    Attributes:
        summary: Of the entries of all ranks; empty if the gathering has failed.
        missing: The ranks that had not come when the first rank reached its limit.
        lost: The rank whose process has ended; -1 if there is none.
        failed: The rank that has left because of an error; -1 if there is none.
        why: The error that this rank, or the one that noticed the end of `lost`, has raised.
        again: Whether all ranks repeat the gathering.
    """

    summary: bytes = b""
    missing: tuple[int, ...] = ()
    lost: int = -1
    failed: int = -1
    why: str = ""
    again: bool = False


_read_verdict = msgspec.msgpack.Decoder(Verdict).decode


def reason_of(error: BaseException) -> str:
    """Return what other ranks read of the error of a rank that has failed."""
    return f"{type(error).__name__}: {error}"[:_WHY_CHARS]


class Gathering:
    """One rank's part of a gathering.

    Args:
        store: Shared by the ranks.
        name: Name of the gathering, the same on all ranks. Its keys begin with it.
        rank: This rank, from 0 to `size` - 1.
        size: How many ranks there are.
        summarize: Makes the summary, which must not be empty, of the entries of all ranks. None:
            the ranks only wait for each other, and no rank reads entries.
        once: Whether the name is used for one attempt only.
        group: Name of the process group, for errors.

    Attributes:
        entry: This rank's.
        number: Number of the attempt; final when the verdict is known.
        verdict: The verdict; None if it is not known yet.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        summarize: Callable[[list[bytes]], bytes] | None = _pack,
        once: bool = True,
        group: str = "",
    ) -> None:
        self.store, self._name, self.rank, self.size = store, name, rank, size
        self._summarize, self._once, self.group = summarize, once, group
        self.entry: str | bytes = b""
        self.number = 0
        self.verdict: Verdict | None = None
        self._counted = self._repeated = self._is_past_limit = False
        self._position = 0
        self._doubt_s = self._doubt_at = self._deadline = self._limit = self.look_at = inf

    def entry_key(self, rank: int) -> str:
        """Return the key of a rank's entry."""
        return f"{self._name}/{self.number}/member/{rank}"

    @property
    def key(self) -> str:
        """The key of the verdict."""
        return f"{self._name}/{self.number}/verdict"

    @property
    def _count_key(self) -> str:
        return f"{self._name}/{self.number}/count"

    @property
    def summary(self) -> bytes:
        """The summary; empty if there is none."""
        return b"" if self.verdict is None else self.verdict.summary

    def count(self) -> bool:
        """Count this rank; return whether it is in time, so that its entry counts, too."""
        while True:
            self._position = self.store.add(self._count_key, 1)
            self._counted = True
            in_time = self._position <= self.size
            if self._once or in_time:
                return in_time
            self.number += 1

    def begin_to_wait(self, deadline: float) -> None:
        """Publish the verdict if this rank was the last one to be counted, else prepare to wait."""
        self._deadline = self._limit = deadline
        self._is_past_limit = False
        self._doubt_s = _DOUBT_S * self._turn
        self._doubt_at = time.monotonic() + self._doubt_s
        self.look_at = min(self._limit, self._doubt_at)
        if self._position == self.size:
            self._conclude(may_repeat=time.monotonic() < deadline)

    @property
    def _turn(self) -> int:
        """1 for the first rank by the count, 2 for the next two, 3 for the next four, ..."""
        return min(self._position, self.size).bit_length()

    def _keys(self) -> list[str]:
        return [self.entry_key(rank) for rank in range(self.size)]

    def _conclude(self, may_repeat: bool) -> None:
        """Publish the summary; all ranks have been counted. Entries may still be under way."""
        if self._summarize is None:
            return self.publish(Verdict(b"complete"))
        keys, end = self._keys(), time.monotonic() + _WRITE_S
        while (left_s := end - time.monotonic()) > 0:
            with suppress(StoreTimeout):
                self.store.wait(keys, timedelta(seconds=min(left_s, _SLICE_S)))
                return self.publish(Verdict(self._summarize(self.store.multi_get(keys))))
            if self.store.check([self.key]):
                return self.read(self.store.get(self.key))
        if may_repeat and not self._repeated:
            self.publish(Verdict(again=True))
        else:
            self._publish_missing()

    def _publish_missing(self) -> None:
        ranks = {self.entry_key(rank): rank for rank in range(self.size)}
        missing = self.store.missing_keys(list(ranks))
        if not missing and self._summarize is not None:  # the last one has come just now
            return self.publish(Verdict(self._summarize(self.store.multi_get(list(ranks)))))
        self.publish(Verdict(missing=tuple(ranks[key] for key in missing)))

    def publish(self, verdict: Verdict) -> None:
        """Publish a verdict, unless there is one."""
        self.read(self.store.compare_set(self.key, "", _pack(verdict)))

    def read(self, packed: bytes) -> None:
        """Follow a verdict that has been published."""
        verdict = _read_verdict(packed)
        if not verdict.again:
            self.verdict = verdict
            return
        self._repeated = True
        self.number += 1
        if self.count():
            self.store.set(self.entry_key(self.rank), self.entry)
        self.begin_to_wait(max(self._deadline, time.monotonic() + _WRITE_S))

    def _close(self) -> bool:
        """Close the gathering; return False if all have come or another rank has closed it."""
        while (count := self.store.add(self._count_key, 0)) < self.size:
            mine = str(_CLOSED * (self.rank + 1) + count)  # no other rank sets this value
            if self.store.compare_set(self._count_key, str(count), mine) == mine.encode():
                return True
        return False

    def fail(self, verdict: Verdict) -> None:
        """Publish a verdict that this rank has not waited for, also if the store is lost."""
        if self.verdict is not None or not (self._counted or self._once):
            return
        packed, self.verdict = _pack(verdict), verdict
        with suppress(StoreError):
            while True:
                self._close()
                self.verdict = _read_verdict(self.store.compare_set(self.key, "", packed))
                if not self.verdict.again:
                    return
                self.number += 1

    def give_up(self, error: BaseException) -> None:
        """Let the other ranks know that this one has left, unless there is a verdict."""
        why = reason_of(error)
        lost = error.peer if isinstance(error, PeerLost) and error.group == self.group else None
        if lost is None:
            self.fail(Verdict(failed=self.rank, why=why))
        else:
            self.fail(Verdict(lost=lost, why=why))

    def look(self, now: float) -> None:
        """Ask whether all have come, and publish what follows from it, if it is time to."""
        if now < self.look_at:
            return
        if now >= self._limit and not self._is_past_limit:
            self._is_past_limit = True
            if self._close():
                return self._publish_missing()
            self._doubt_at, self._limit = inf, now + _GRACE_S * (self._turn - 1)
        elif now >= self._doubt_at:
            self._doubt_at, self._doubt_s = now + self._doubt_s, 2 * self._doubt_s
        self.look_at = min(self._limit, self._doubt_at)
        if self._is_past_limit and now < self._limit:
            return
        count = self.store.add(self._count_key, 0)
        if count >= _CLOSED:
            self._publish_missing()
        elif count >= self.size:
            self._conclude(may_repeat=not self._is_past_limit)

    def forget(self) -> None:
        """Remove the keys, which no rank needs any more."""
        names = ("count", "verdict", *(f"member/{rank}" for rank in range(self.size)))
        keys = [f"{self._name}/{n}/{name}" for n in range(self.number + 1) for name in names]
        self.store.delete_keys(keys)

    def error(self, elapsed_s: float) -> RendezvousError | PeerLost:
        """Return the error for a verdict that is not complete."""
        verdict = self.verdict
        assert verdict is not None
        where: dict[str, Any] = {
            "op": self._name,
            "group": self.group or None,
            "rank": self.rank,
            "world_size": self.size,
            "elapsed_s": elapsed_s,
        }
        if verdict.lost >= 0:
            what = f"the process of rank {verdict.lost} has ended"
            return PeerLost(what, peer=verdict.lost, seen=verdict.why, **where)
        if verdict.failed >= 0:
            what = f"rank {verdict.failed} has failed, and is not waited for"
            return RendezvousError(what, peer=verdict.failed, seen=verdict.why, **where)
        late = "; this rank was late" if self.rank in verdict.missing else ""
        return RendezvousTimeout(
            "not all ranks came in time",
            came=tuple(sorted(set(range(self.size)).difference(verdict.missing))),
            missing=verdict.missing,
            seen=f"missing are ranks {list(verdict.missing)}{late}",
            fix="See what these ranks do, or raise the timeout.",
            **where,
        )


def wait_for_verdicts(
    gatherings: Sequence[Gathering],
    limit: timedelta,
    watch: Callable[[], float] | None = None,
) -> Gathering | None:
    """Arrive at gatherings, with this rank's entries, and wait for their verdicts.

    Args:
        gatherings: To wait for; all in one store.
        limit: How long to wait.
        watch: Called before each wait; returns how long that may take at most, in seconds.

    Returns:
        None if all are complete, otherwise one that is not. Then some may have no verdict.
    """
    deadline, store = time.monotonic() + limit.total_seconds(), gatherings[0].store
    in_time = [each for each in gatherings if each.count()]
    if in_time:
        keys = [each.entry_key(each.rank) for each in in_time]
        store.multi_set(keys, [each.entry for each in in_time])
    for each in gatherings:
        each.begin_to_wait(deadline)
    while True:
        waiting = {g.key: g for g in gatherings if g.verdict is None}
        failed = next((g for g in gatherings if g.verdict is not None and not g.summary), None)
        if failed is not None or not waiting:
            return failed
        end = min(each.look_at for each in waiting.values())
        if watch is not None:
            end = min(end, time.monotonic() + watch())
        if len(waiting) > 1:
            end = min(end, time.monotonic() + _LOOK_S)
        try:
            left_s = max(0.0, end - time.monotonic())
            store.wait(list(waiting), timedelta(seconds=left_s))
            there = list(waiting)
        except StoreTimeout:
            missing = set(store.missing_keys(list(waiting)) if len(waiting) > 1 else waiting)
            there = [key for key in waiting if key not in missing]
        if there:
            for key, packed in zip(there, store.multi_get(there), strict=True):
                waiting[key].read(packed)
        for each in waiting.values():
            if each.verdict is None:
                each.look(time.monotonic())


def gather(gathering: Gathering, entry: str | bytes, limit: timedelta) -> bytes:
    """Exchange an entry; return the summary.

    Args:
        gathering: Of this rank.
        entry: This rank's.
        limit: How long to wait for the other ranks.

    Raises:
        RendezvousTimeout: A rank did not come before the limit of the first one that waited.
        PeerLost: The process of a rank has ended.
        RendezvousError: A rank has failed or was interrupted.

    Collective:
        All ranks call, and all return or all raise.

    Cost:
        4 requests to the store, and the bytes of the summary. The last rank to come has 5, and
        reads the entries of all. Two more per earlier attempt of the name.
    """
    began = time.monotonic()
    gathering.entry = entry
    try:
        if wait_for_verdicts([gathering], limit) is not None:
            raise gathering.error(time.monotonic() - began)
    except BaseException as error:
        gathering.give_up(error)
        raise
    return gathering.summary


def gather_all(gathering: Gathering, entry: str | bytes, limit: timedelta) -> list[bytes]:
    """Exchange an entry; return those of all ranks. Otherwise as `gather`."""
    return _read_entries(gather(gathering, entry, limit))
