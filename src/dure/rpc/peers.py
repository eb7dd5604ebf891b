"""The membership of an RPC world: who has joined, how they are reached, and who has ended.

Processes meet in a store. In a *fixed world* of n each has a rank, which is its id. All have joined
before `init_rpc` returns on any, and an error (for example two processes with one name) is raised
on all. With *dynamic membership* a process joins and leaves at any time.

Changes are events of a *log* in the store, `event/0`, `event/1`, ... A process appends an event by
compare-and-set, so that all read the same events in the same order. A process that joins reads all
of them first, and so knows whether its name is free. A fixed world on one host has no log: there
the kernel reports deaths, and a process that leaves notifies each other (`transport`).

The log has two events per process that ever joined, so at most twice `MOST_IDS`, of some 150 bytes
together. They are not removed; a process that joins reads them, some 10,000 per second.

An id is never reused: a process that was given up stays gone, and a process that replaces it under
its name has another id.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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

__all__ = ["LEFT", "MOST_IDS", "PeerAddress", "Peers"]

_NAMED_S = 5.0
"""How long, beyond the silence of a host, a joining process waits for a name whose last owner, on
another host, may be gone."""

_LOOK_S = 0.1
_NONE = b"-"
"""Represents a missing key; never a value."""
_CLOSE_S = 5.0
_LONG = timedelta(minutes=1)
"""How long a process may take to notice that it missed events."""
MOST_IDS = 1 << 16
"""How many processes may ever join a world: ids have 16 bits in the numbers of contexts."""

LEFT = "it left"
"""How a process ended that has ended RPC and may still run."""

_log = logs.logger("rpc")


class PeerAddress(msgspec.Struct, array_like=True, frozen=True):
    """A process, and how others reach it.

    Args:
        name: Its name.
        id: Its id.
        process: Identifies it among the processes of all hosts.
        heap: How others of its host map its memory.
        inbox: The offset of its inbox in that.
        endpoint: The address of its socket.
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
    """A process has joined, or, if `joined` is None, the process `gone` has ended."""

    joined: PeerAddress | None = None
    gone: int = -1
    how: str = ""


_pack = msgspec.msgpack.Encoder().encode
_read_peer = msgspec.msgpack.Decoder(PeerAddress).decode
_read_event = msgspec.msgpack.Decoder(_Event).decode


class Peers:
    """The processes that this one knows; made by `meet` or `join`.

    Args:
        store: Contains the keys of this world only.
        own_id: The id of this process.
        known: The processes that have joined.
        logged: Whether there is a log.

    Attributes:
        logged: As given.

    Threads: all methods may be called from any thread.
    """

    def __init__(
        self, store: Store, own_id: int, known: Sequence[PeerAddress], logged: bool
    ) -> None:
        self._store, self.own_id, self.logged = store, own_id, logged
        self._lock = threading.Lock()
        self._by_id = {peer.id: peer for peer in known}
        self._gone: dict[int, str] = {}
        self._next = 0  # the event that is read next
        self._reading = threading.Lock()  # held while the log is read
        self._unreported: deque[_Event] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def meet(cls, store: Store, me: PeerAddress, world_size: int) -> Peers:
        """Join a fixed world; `me.id` is this process's rank.

        Collective:
            All call, and wait for each other as long as the store's timeout.

        Raises:
            RendezvousError: Two processes have the same name, or a name is invalid; on all.
        """
        store.set(f"peer/{me.id}", _pack(me))
        found = store.multi_get([f"peer/{rank}" for rank in range(world_size)])
        known = [_read_peer(each) for each in found]
        names: dict[str, PeerAddress] = {}
        for peer in known:
            _check_name(peer)
            other = names.setdefault(peer.name, peer)
            if other is not peer:
                raise _not_unique(peer, other)
        one_host = len({peer.process.host_id for peer in known}) == 1
        return cls(store, me.id, known, logged=not one_host)

    @classmethod
    def join(cls, store: Store, me: PeerAddress) -> Peers:
        """Join a world with dynamic membership; `me.id` is the wanted id, -1 for any.

        If another process has had that id, the next id after all used ones is taken.

        Raises:
            RendezvousError: A running process has this name, or the name is invalid; all ids were
                used; the others run another build of Dure.
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
    def me(self) -> PeerAddress:
        """This process."""
        return self._by_id[self.own_id]

    def all(self) -> list[PeerAddress]:
        """Return the processes that are not gone, including this one, by id."""
        with self._lock:
            return [peer for id, peer in sorted(self._by_id.items()) if id not in self._gone]

    def find(self, id: int) -> PeerAddress | None:
        """Return the process with an id, also if it is gone; None if there never was one."""
        if id not in self._by_id and self.logged:
            self._read()
        return self._by_id.get(id)

    def named(self, name: str) -> PeerAddress | None:
        """Return the process with a name, or None."""
        found = next((peer for peer in self.all() if peer.name == name), None)
        if found is None and self.logged:
            self._read()
            found = next((peer for peer in self.all() if peer.name == name), None)
        return found

    def watch(
        self, joined: Callable[[PeerAddress], None], gone: Callable[[int, str], None]
    ) -> None:
        """Report all known processes now, and from now on those that join and those that end.

        Later events are reported in their order, by a thread of this object. Processes that are
        gone already are reported, too, because others may ask about them. `gone` is called for this
        process if others have given it up.
        """
        with self._reading:
            self._unreported.clear()
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
        """Report to the others that a process is gone for good; returns at once."""
        if self.logged and not self._closed:
            event = _Event(gone=id, how=how)
            threading.Thread(target=self._append, args=(event,), daemon=True).start()

    def close(self) -> None:
        """Leave the world."""
        if self._closed:
            return
        self._closed = True
        if self.logged:
            self._append(_Event(gone=self.own_id, how=LEFT))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _free_id(self, wanted: int) -> int:
        """Return the wanted id if it is free, else another; -1 for any."""
        had = self._by_id.keys() | self._gone.keys()
        if wanted >= 0 and wanted not in had:
            return wanted
        for id in (max(had, default=-1) + 1, *range(MOST_IDS)):  # the first may be too large
            if id < MOST_IDS and id not in had:
                return id
        raise RendezvousError(
            "all ids were used",
            seen=f"{MOST_IDS:,} processes have joined",
            fix="Start a new world, with another `init_method` or store.",
        )

    # --- the log -----------------------------------------------------------------------------

    def _append(self, event: _Event) -> None:
        """Write an event at the end, unless its process is known to be gone."""
        try:
            while event.gone not in self._gone and not self._write(event):
                self._read()
        except StoreError as error:
            _log.warning("the others cannot be notified of a process that is gone: %s", error)

    def _write(self, event: _Event) -> bool:
        """Write the next event; False if another process has written it."""
        packed = _pack(event)
        return self._store.compare_set(f"event/{self._next}", "", packed) == packed

    def _read(self) -> None:
        """Read the new events."""
        with self._reading:
            while True:  # a missing key is not set, and returned as `_NONE`
                packed = self._store.compare_set(f"event/{self._next}", _NONE, _NONE)
                if packed == _NONE:
                    return
                self._apply(_read_event(packed))

    def _apply(self, event: _Event) -> None:
        with self._lock:
            self._next += 1
            if event.joined is not None:
                self._by_id[event.joined.id] = event.joined
            elif event.gone in self._gone:
                return
            else:
                self._gone[event.gone] = event.how
        self._unreported.append(event)

    def _wait(
        self, joined: Callable[[PeerAddress], None], gone: Callable[[int, str], None]
    ) -> None:
        """Wait for events and report them; runs in its own thread."""
        while True:
            with self._reading:  # if another thread reads from here on, this one is woken
                awaited = f"event/{self._next}"
            while self._unreported:
                event = self._unreported.popleft()
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
                    _log.warning("workers that join or leave RPC are no longer noticed: %s", error)
                return


def _check_name(peer: PeerAddress) -> None:
    try:
        WorkerInfo(peer.name, peer.id)
    except RpcError as error:
        raise RendezvousError(error.what, seen=f"{error.seen}, of {peer.process}") from None


def _not_unique(peer: PeerAddress, other: PeerAddress) -> RendezvousError:
    return RendezvousError(
        f"the RPC worker name {peer.name!r} is not unique",
        seen=f"{other.process} (id {other.id}) has it, and {peer.process} wants it",
        fix="Give every process another name (init_rpc(name)).",
    )
