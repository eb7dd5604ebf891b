"""The membership of an RPC world: who has joined, how they are reached, and who has ended.

Processes meet in a store. In a *fixed world* of n each has a rank, which is its id. All have joined
before `init_rpc` returns on any, and an error (for example two processes with one name) is raised
on all. With *dynamic membership* a process joins and leaves at any time.

Changes are events of a *log* in the store, `event/0`, `event/1`, ... A process appends an event by
compare-and-set, so that all read the same events in the same order. A process that joins reads all
of them first, and so knows whether its name is free. A fixed world on one host has no log: there
the kernel reports deaths, and a process that leaves notifies each other (`transport`).

The one request that writes an event makes it valid, and wakes the processes that wait for it.
Nothing is claimed before, so a process that dies between two requests delays no other process.
More keys save requests, and may be wrong:

- `events`, the *count*, is at most the number of events, because a writer raises it afterwards. A
  process that joins reads that many events in one request. It finds the others, if a writer died
  before it raised the count, when it tries to write.
- `requests/N` are *requests* to join with event N. A process adds its own request. The first one
  lets others arrive, reads all, and writes one event for all of them. The others wait for it, but
  not for long, because the first one may have died, and then write the event themselves. So of
  1,000 processes that join at once, each tries a few times, not 1,000 times. Requests that the
  written event does not contain are repeated by their processes, with the next number.

Each process that ever joined is in two events, so in at most twice `MOST_IDS`, of some 150 bytes
together. They are not removed.

An id is never reused: a process that was given up stays gone, and a process that replaces it under
its name has another id.
"""

from __future__ import annotations

import random
import secrets
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

__all__ = ["LEFT", "MOST_IDS", "PeerAddress", "Peers"]

_NAMED_S = 5.0
"""How long, beyond the silence of a host, a joining process waits for a name whose last owner, on
another host, may be gone."""

_LOOK_S = 0.1
_PAUSE_S = 0.01
"""How long, at most, a process that has to request again lets other requests arrive first; twice as
long each time, up to `_LOOK_S`, so that few events are written if many processes join at once."""
_GATHER_S = 0.5
"""How long, at most, it lets them arrive while they do; less than `_PATIENCE`."""
_PATIENCE = timedelta(seconds=1)
"""How long a process waits for the event that another should write for it."""
_COUNT_TRIES = 3
"""How often a writer tries to raise the count before it leaves that to other writers."""
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


class _Request(msgspec.Struct, array_like=True, frozen=True):
    """A process that wants to join; if it has joined, with its id.

    Args:
        peer: The process.
        token: A random word, by which the process recognizes its request.
    """

    peer: PeerAddress
    token: str


class _Event(msgspec.Struct, array_like=True, frozen=True):
    """Processes have joined, or, if `joined` is empty, the process `gone` has ended."""

    joined: tuple[_Request, ...] = ()
    gone: int = -1
    how: str = ""


_pack = msgspec.msgpack.Encoder().encode
_read_peer = msgspec.msgpack.Decoder(PeerAddress).decode
_read_event = msgspec.msgpack.Decoder(_Event).decode
_request_line = msgspec.json.Encoder().encode
_read_requests = msgspec.json.Decoder(_Request).decode_lines


class Peers:
    """The processes that this one knows; made by `meet` or `join`.

    Args:
        store: Contains the keys of this world only.
        own_id: The id of this process.
        known: The processes that have joined.
        logged: Whether there is a log.

    Attributes:
        logged: As given.

    Threads:
        All methods may be called from any thread.
    """

    def __init__(
        self, store: Store, own_id: int, known: Sequence[PeerAddress], logged: bool
    ) -> None:
        self._store, self.own_id, self.logged = store, own_id, logged
        self._lock = threading.Lock()
        self._by_id = {peer.id: peer for peer in known}
        self._gone: dict[int, str] = {}
        self._highest = max(self._by_id, default=-1)  # the highest id so far
        self._token = secrets.token_hex(8)
        self._next = 0  # the event that is read next
        self._requested = -1  # the event with which this process has requested to join
        self._counted = 0  # the count of events that was seen last
        self._counting = threading.Lock()  # held while the count is raised
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

        Cost:
            Seven requests, in a world of any size; some four more each time that another process
            writes the event.
        """
        _check_name(me)
        peers = cls(store, -1, (), logged=True)
        try:
            peers._join(me)
        except BaseException:
            peers._take_back(me)
            raise
        return peers

    def _join(self, me: PeerAddress) -> None:
        """See `join`."""
        deadline = time.monotonic() + silence_s() + _NAMED_S
        self._read_counted()
        pause_s = 0.0
        while True:
            known = self.all()
            _check_builds(known, me)
            other = next((peer for peer in known if peer.name == me.name), None)
            if other is None:
                if self._try_to_join(_Request(me, self._token), pause_s):
                    return
                pause_s = min(2 * pause_s + _PAUSE_S * random.random(), _LOOK_S)
            elif alive(other.process) is False:
                self._write(_Event(gone=other.id))
            elif alive(other.process) or time.monotonic() >= deadline:
                raise _not_unique(me, other)
            else:
                time.sleep(_LOOK_S)
                self._read()

    def _take_back(self, me: PeerAddress) -> None:
        """Leave after an error or an interrupt, even if another process grants the request later.

        Only the event for which it was made can grant it. If there is none yet, this process writes
        it: it joins, and leaves.
        """
        with suppress(StoreError, RendezvousError):
            if self._requested >= self._next:
                self._read()
            while self.own_id < 0 and self._requested >= self._next:
                self._write(_Event(joined=self._granted(_Request(me, self._token), ())))
            if self.own_id >= 0:
                self._append(_Event(gone=self.own_id, how=LEFT))

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

    # --- joining -----------------------------------------------------------------------------

    def _try_to_join(self, own: _Request, pause_s: float) -> bool:
        """Request to join with the next event, and write it or wait for it.

        Args:
            own: The request.
            pause_s: How long the first process waits for other requests.

        Returns:
            Whether this process has joined.
        """
        event, key = f"event/{self._next}", f"requests/{self._next}"
        self._requested = self._next
        self._store.append(key, _request_line(own) + b"\n")
        if self._store.add(f"{key}/count", 1) == 1:
            requests = self._requests_of(key, pause_s)
        else:
            with suppress(StoreTimeout):
                self._store.wait([event], _PATIENCE)
                self._read()
                return self.own_id >= 0
            requests = _read_requests(self._store.get(key))
        self._write(_Event(joined=self._granted(own, requests)))
        return self.own_id >= 0

    def _requests_of(self, key: str, pause_s: float) -> list[_Request]:
        """Return the requests when no more come for `pause_s`, or after `_GATHER_S`."""
        end, seen = time.monotonic() + _GATHER_S, 1
        while True:
            time.sleep(pause_s)
            requests = _read_requests(self._store.get(key))
            if len(requests) <= seen or pause_s == 0 or time.monotonic() >= end:
                return requests
            seen = len(requests)

    def _granted(self, own: _Request, requests: Iterable[_Request]) -> tuple[_Request, ...]:
        """Return the requests that can be granted, with their ids; this process's is the first.

        The others are left to their processes, which raise the error.
        """
        names, ids = {peer.name for peer in self.all()}, set[int]()
        granted: list[_Request] = []
        highest = self._highest
        for request in (own, *requests):
            peer = request.peer
            if peer.name in names or peer.build != own.peer.build:
                continue
            id = self._free_id(peer.id, highest, ids)
            if id is None:
                break
            names.add(peer.name)
            ids.add(id)
            highest = max(highest, id)
            granted.append(_Request(msgspec.structs.replace(peer, id=id), request.token))
        if granted:
            return tuple(granted)
        raise RendezvousError(
            "all ids were used",
            seen=f"{MOST_IDS:,} processes have joined",
            fix="Start a new world, with another `init_method` or store.",
        )

    def _free_id(self, wanted: int, highest: int, granted: set[int]) -> int | None:
        """Return the wanted id if it is free, else another, None if all were used.

        Args:
            wanted: -1 for any.
            highest: The highest id of a process and of `granted`.
            granted: Ids that the next event gives.
        """

        def is_free(id: int) -> bool:
            return not (id in self._by_id or id in self._gone or id in granted)

        if wanted >= 0 and is_free(wanted):
            return wanted
        if highest + 1 < MOST_IDS:
            return highest + 1
        return next(filter(is_free, range(MOST_IDS)), None)

    # --- the log -----------------------------------------------------------------------------

    def _append(self, event: _Event) -> None:
        """Write an event at the end, unless its process is known to be gone."""
        try:
            while event.gone not in self._gone:
                self._write(event)
        except StoreError as error:
            _log.warning("the others cannot be notified of a process that is gone: %s", error)

    def _write(self, event: _Event) -> None:
        """Write the next event, or apply the event that another process has written there."""
        packed = _pack(event)
        with self._reading:
            there = self._store.compare_set(f"event/{self._next}", "", packed)
            self._apply(_read_event(there))
        if there == packed:
            self._raise_count()

    def _raise_count(self) -> None:
        """Raise the count of events to those that are known; a lower count costs requests only."""
        with suppress(StoreError), self._counting:
            for _ in range(_COUNT_TRIES):
                if self._counted >= self._next:
                    return
                known = str(self._counted) if self._counted else ""
                there = self._store.compare_set("events", known, str(self._next))
                self._counted = int(there)

    def _read_counted(self) -> None:
        """Read all events that are counted, in one request; others may follow."""
        count = self._store.compare_set("events", _NONE, _NONE)
        if count == _NONE:
            return
        with self._reading:
            self._counted = int(count)
            keys = [f"event/{number}" for number in range(self._next, self._counted)]
            for packed in self._store.multi_get(keys):
                self._apply(_read_event(packed))

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
            for peer, token in ((each.peer, each.token) for each in event.joined):
                self._by_id[peer.id] = peer
                self._highest = max(self._highest, peer.id)
                if token == self._token:
                    self.own_id = peer.id
            if not event.joined:
                if event.gone in self._gone:
                    return
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
                if not event.joined:
                    gone(event.gone, event.how)
                for request in event.joined:
                    if request.peer.id != self.own_id:
                        joined(request.peer)
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


def _check_builds(known: Iterable[PeerAddress], me: PeerAddress) -> None:
    """Compare the builds of running processes; few have to be looked up, because builds are equal.

    Raises:
        RendezvousError: They differ.
    """
    if any(peer.build != me.build and alive(peer.process) is not False for peer in known):
        living = [peer for peer in known if alive(peer.process) is not False]
        require_one_build((peer.build, peer) for peer in (*living, me))


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
