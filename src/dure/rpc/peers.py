"""Who takes part in RPC: who they are, where they are reached, who has come and who is gone.

Processes meet in a store. In a *fixed world* of n each has a rank, which is its id; all are there
before anybody goes on, and what is wrong (two with one name, say) is an error on all. With *dynamic
membership* a process joins and leaves at any time.

What changes is a *log* in the store, `event/0`, `event/1`, ...: whoever has something to say writes
it at the end, by compare-and-set, so that all read the same, in the same order; who wants to join
reads it all before, and so knows whether its name is free. A fixed world of one host needs no log,
for there the kernel tells of deaths, and who leaves tells each (`transport`).

The log does not grow with the number of processes that came and went. The process that writes every
64th event also writes a *snapshot* of what all events until then amount to, and removes events that
are older than the last 64 of it. A process that finds its next event removed takes the snapshot in
its place; one that has written an event where others had been removed takes it back. Snapshots are
set by compare-and-set, too, so that a late one does not replace a newer one.

An id is never used again: a process that was given up stays so, and who comes again under its name
has another id.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec

from dure.errors import RendezvousError, RpcError, StoreError, StoreTimeout
from dure.rpc.names import WorkerInfo
from dure.store.base import Store
from dure.store.builds import Build, require_one_build
from dure.store.identity import Identity, alive
from dure.store.silence import silence_s
from dure.trace import logs

__all__ = ["LEFT", "MOST_IDS", "Peer", "Peers"]

_NAMED_S = 5.0
"""How much longer than a host may be silent a name is waited for whose last owner, on another host,
is perhaps gone."""

_LOOK_S = 0.1
_SNAPSHOT_EVENTS = 64
"""How many events there are from one snapshot to the next."""
_KEPT_EVENTS = 64
"""How many events before a snapshot are kept, for those who are about to read them."""
_KEPT_REASONS = 64
"""Of how many of those that are gone a snapshot says how they ended."""
_NONE = b"-"
"""Marks a missing key; never used as a value."""
_CLOSE_S = 5.0
_LONG = timedelta(minutes=1)
"""How long a process may not notice that it missed events."""
MOST_IDS = 1 << 16
"""How many processes there can be in the life of a world: numbers of contexts begin with an id."""

LEFT = "it left"
"""How a process is gone that ended RPC, and lives on perhaps."""

_log = logs.logger("rpc")


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """A process that takes part.

    Args:
        name: Its name.
        id: Its id.
        process: Who it is.
        heap: How others of its host find its memory.
        inbox: Where in it its inbox is.
        endpoint: Where its socket is.
        build: Its build of Dure.
    """

    name: str
    id: int
    process: Identity
    heap: tuple[int, int, int]
    inbox: int
    endpoint: str
    build: Build = Build()

    def __str__(self) -> str:
        return f"{self.name} (id {self.id}, {self.process})"


class _Event(msgspec.Struct, array_like=True, frozen=True):
    """That a process has joined, or (`joined` None) that the process `gone` is gone, and how."""

    joined: Peer | None = None
    gone: int = -1
    how: str = ""


class _Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """What all events before `next` amount to.

    Args:
        next: The first event that it does not know.
        there: The processes that are there.
        gone: The ids of those that are gone, as pairs of first and last.
        reasons: How the last ones of them ended.
    """

    next: int
    there: tuple[Peer, ...]
    gone: tuple[tuple[int, int], ...]
    reasons: dict[int, str]


_pack = msgspec.msgpack.Encoder().encode
_read_peer = msgspec.msgpack.Decoder(Peer).decode
_read_event = msgspec.msgpack.Decoder(_Event).decode
_read_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


class Peers:
    """The processes, as this one knows them; made by `meet` or `join`.

    Args:
        store: Keys of this world alone.
        own_id: This process's id.
        known: The processes that are there.
        logged: Whether there is a log.

    Attributes:
        logged: The same.

    Threads: all methods may be called from any thread.
    """

    def __init__(self, store: Store, own_id: int, known: Sequence[Peer], logged: bool) -> None:
        self._store, self.own_id, self.logged = store, own_id, logged
        self._lock = threading.Lock()
        self._by_id = {peer.id: peer for peer in known}
        self._gone: dict[int, str] = {}
        self._next = 0  # the event that is read next
        self._reading = threading.Lock()  # held while the log is read
        self._untold: deque[_Event] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def meet(cls, store: Store, me: Peer, world_size: int) -> Peers:
        """Meet the others of a fixed world; `me.id` is this process's rank.

        Collective:
            All call, and wait for each other as long as the store's timeout.

        Raises:
            RendezvousError: Two have one name, or a name cannot be one; on all.
        """
        store.set(f"peer/{me.id}", _pack(me))
        found = store.multi_get([f"peer/{rank}" for rank in range(world_size)])
        known = [_read_peer(each) for each in found]
        names: dict[str, Peer] = {}
        for peer in known:
            _check_name(peer)
            other = names.setdefault(peer.name, peer)
            if other is not peer:
                raise _not_unique(peer, other)
        one_host = len({peer.process.host_id for peer in known}) == 1
        return cls(store, me.id, known, logged=not one_host)

    @classmethod
    def join(cls, store: Store, me: Peer) -> Peers:
        """Join those that are there; `me.id` is the id that is wanted, -1 for any.

        Where another process has had that id, it is the next after all that were had.

        Raises:
            RendezvousError: A living process has this name, or the name cannot be one; all ids
                were had; the others run another build of Dure.
        """
        _check_name(me)
        peers = cls(store, me.id, (), logged=True)
        deadline = time.monotonic() + silence_s() + _NAMED_S
        while True:
            peers._read()
            living = [peer for peer in peers.all() if alive(peer.process) is not False]
            require_one_build((peer.build, peer) for peer in (*living, me))
            other = next((p for p in peers.all() if p.name == me.name), None)
            if other is None:
                id = peers._free_id(me.id)
                if peers._write(_Event(joined=msgspec.structs.replace(me, id=id))):
                    peers.own_id = id
                    peers._read()
                    return peers
            elif alive(other.process) is False:
                peers._write(_Event(gone=other.id))
            elif alive(other.process) or time.monotonic() >= deadline:
                raise _not_unique(me, other)
            else:
                time.sleep(_LOOK_S)

    @property
    def me(self) -> Peer:
        """This process."""
        return self._by_id[self.own_id]

    def all(self) -> list[Peer]:
        """Return those that are there, this process among them, by id."""
        with self._lock:
            return [peer for id, peer in sorted(self._by_id.items()) if id not in self._gone]

    def find(self, id: int) -> Peer | None:
        """Return the process with an id, also one that is gone; None: there never was one."""
        if id not in self._by_id and self.logged:
            self._read()
        return self._by_id.get(id)

    def named(self, name: str) -> Peer | None:
        """Return the process with a name; None: there is none."""
        found = next((peer for peer in self.all() if peer.name == name), None)
        if found is None and self.logged:
            self._read()
            found = next((peer for peer in self.all() if peer.name == name), None)
        return found

    def watch(self, joined: Callable[[Peer], None], gone: Callable[[int, str], None]) -> None:
        """Be told of all that are there already, and from now on of who joins and who is gone.

        They are told in the order in which it happened, by a thread of this object's. Those that
        were gone before are told to be, too, for others may ask about them. Of this process, `gone`
        is told if others have given it up.
        """
        with self._reading:
            self._untold.clear()
            there, lost = self.all(), dict(self._gone)
        for id, how in lost.items():
            gone(id, how)
        for peer in there:
            if peer.id != self.own_id:
                joined(peer)
        if self.logged:
            self._thread = threading.Thread(
                target=self._wait, args=(joined, gone), name="dure-rpc-peers", daemon=True
            )
            self._thread.start()

    def give_up(self, id: int, how: str) -> None:
        """Tell the others that a process is gone for good; returns at once."""
        if self.logged and not self._closed:
            event = _Event(gone=id, how=how)
            threading.Thread(target=self._append, args=(event,), daemon=True).start()

    def close(self) -> None:
        """Leave."""
        if self._closed:
            return
        self._closed = True
        if self.logged:
            self._append(_Event(gone=self.own_id, how=LEFT))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _free_id(self, wanted: int) -> int:
        """Return the id for one who wants this one, or any (-1)."""
        had = self._by_id.keys() | self._gone.keys()
        if wanted >= 0 and wanted not in had:
            return wanted
        for id in (max(had, default=-1) + 1, *range(MOST_IDS)):  # the last one may have been wanted
            if id < MOST_IDS and id not in had:
                return id
        raise RendezvousError(
            "there is no id left for one more process",
            seen=f"{MOST_IDS:,} have been here",
            fix="Begin a new world: another `init_method`, or store.",
        )

    # --- the log -----------------------------------------------------------------------------

    def _append(self, event: _Event) -> None:
        """Write an event at the end, unless it tells of one who is known to be gone."""
        try:
            while event.gone not in self._gone and not self._write(event):
                self._read()
        except StoreError as error:
            _log.warning("the others cannot be told of who is gone: %s", error)

    def _write(self, event: _Event) -> bool:
        """Write the event that is next; False: another has written it."""
        packed, number = _pack(event), self._next
        if self._store.compare_set(f"event/{number}", "", packed) != packed:
            return False
        with suppress(StoreError):  # the event is there, whatever comes of what follows
            snapshot = self._snapshot()
            if snapshot is not None and number < snapshot.next - _KEPT_EVENTS:
                self._store.delete_key(f"event/{number}")
                return False
            if (number + 1) % _SNAPSHOT_EVENTS == 0:
                self._read()
                self._compact()
        return True

    def _peek(self, key: str) -> bytes | None:
        """Return the value of a key, at once; None: it is not there."""
        found = self._store.compare_set(key, _NONE, _NONE)
        return None if found == _NONE else found

    def _snapshot(self) -> _Snapshot | None:
        packed = self._peek("snapshot")
        return None if packed is None else _read_snapshot(packed)

    def _read(self) -> None:
        """Read the events that are new."""
        with self._reading:
            while True:
                packed = self._peek(f"event/{self._next}")
                if packed is not None:
                    self._take(_read_event(packed))
                    continue
                snapshot = self._snapshot()
                if snapshot is None or self._next >= snapshot.next - _KEPT_EVENTS:
                    return
                self._catch_up(snapshot)

    def _take(self, event: _Event) -> None:
        with self._lock:
            self._next += 1
            if event.joined is not None:
                self._by_id[event.joined.id] = event.joined
            elif event.gone in self._gone:
                return
            else:
                self._gone[event.gone] = event.how
        self._untold.append(event)

    def _catch_up(self, snapshot: _Snapshot) -> None:
        """Take a snapshot in the place of events that were removed."""
        with self._lock:
            ids = [id for first, last in snapshot.gone for id in range(first, last + 1)]
            lost = {id: snapshot.reasons.get(id, "") for id in ids if id not in self._gone}
            new = [peer for peer in snapshot.there if peer.id not in self._by_id]
            self._gone.update(lost)
            self._by_id.update({peer.id: peer for peer in new})
            self._next = snapshot.next
        self._untold.extend(_Event(gone=id, how=how) for id, how in lost.items())
        self._untold.extend(_Event(joined=peer) for peer in new)

    def _compact(self) -> None:
        """Write a snapshot, unless there is a newer one, and remove events that it stands for."""
        with self._lock:
            there = [peer for id, peer in self._by_id.items() if id not in self._gone]
            reasons = dict(list(self._gone.items())[-_KEPT_REASONS:])
            mine = _Snapshot(self._next, tuple(there), _ranges_of(self._gone), reasons)
        packed = _pack(mine)
        while True:
            old = self._peek("snapshot")
            first = 0 if old is None else _read_snapshot(old).next
            if first >= mine.next:
                return
            if self._store.compare_set("snapshot", old or "", packed) == packed:
                break
        for number in range(max(0, first - _KEPT_EVENTS), mine.next - _KEPT_EVENTS):
            self._store.delete_key(f"event/{number}")

    def _wait(self, joined: Callable[[Peer], None], gone: Callable[[int, str], None]) -> None:
        """In a thread of its own: wait for events, and tell of them."""
        while True:
            with self._reading:  # what others read from here on wakes this thread
                awaited = f"event/{self._next}"
            while self._untold:
                event = self._untold.popleft()
                if event.joined is None:
                    gone(event.gone, event.how)
                elif event.joined.id != self.own_id:
                    joined(event.joined)
            if self._closed or self.own_id in self._gone:
                return
            try:
                with suppress(StoreTimeout):
                    self._store.wait([awaited], _LONG)
                self._read()
            except StoreError as error:
                if not self._closed:
                    _log.warning("who joins and leaves RPC is no longer known: %s", error)
                return


def _ranges_of(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as pairs of first and last."""
    ranges: list[tuple[int, int]] = []
    for id in sorted(ids):
        if ranges and ranges[-1][1] == id - 1:
            ranges[-1] = (ranges[-1][0], id)
        else:
            ranges.append((id, id))
    return tuple(ranges)


def _check_name(peer: Peer) -> None:
    try:
        WorkerInfo(peer.name, peer.id)
    except RpcError as error:
        raise RendezvousError(error.what, seen=f"{error.seen}, of {peer.process}") from None


def _not_unique(peer: Peer, other: Peer) -> RendezvousError:
    return RendezvousError(
        f"the RPC worker name {peer.name!r} is not unique",
        seen=f"{other.process} (id {other.id}) has it, and {peer.process} wants it",
        fix="Give every process a name of its own (init_rpc(name)).",
    )
