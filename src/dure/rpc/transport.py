"""How messages reach the other processes of the job.

**Within a host** a message goes through a ring of shared memory (`csrc/core/inbox.h`), read by
whichever thread is free. The memory of its tensors is copied once, by the sender, into memory of
its heap that is the receiver's alone from then on; so is a message that is too long for a ring. A
process has 16 rings for those that send to it. Where a ring is full, or there is none, the message
goes through a socket; nobody ever waits for a receiver.

**Between hosts** all goes through sockets (`sockets`). So it does where a process cannot map the
memory of another of its host (a limit of address space, another container). It finds that out by
itself: what it cannot read it sends back, and the sender sends that again through a socket, and all
that follows.

**Who is gone.** The kernel tells of processes of this host, by their pidfds; where it gives none, a
thread looks from time to time. Processes of other
hosts are gone when they cannot be reached for a while, or when others say so (`peers`). Who leaves
and lives on says so itself: in the log, or, where there is none, in a last message. Before the
program is told, what came from the process is read; a message that some thread holds in its hands
at that moment is dropped, as if it had never arrived.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import msgspec
import torch

from dure import native
from dure.errors import PeerLost
from dure.rpc.envelope import Envelope, Receiver, Transport, Waiter, Work
from dure.rpc.memory import INLINE_BYTES, Memory, bytes_of, describe, give, own, take
from dure.rpc.message import Body
from dure.rpc.peers import LEFT, Peer, Peers
from dure.rpc.sockets import Sockets, Told
from dure.rpc.workers import Workers
from dure.store.identity import alive
from dure.trace import logs

__all__ = ["HostTransport"]

_RING_BYTES = 16 << 10
"""Messages above this size travel as memory do."""

_RINGS = 16
_BUSY = 64  # messages to a process, after which a ring is asked for where there are many processes
_OWN = b"\xc0"  # stands in the inbox for a message of this process to itself
_ELSEWHERE = -1  # the kind of an envelope whose only memory holds the envelope
_LEAVING = -2  # the kind of an envelope whose sender sends no more
_UNREAD = -3  # the kind of an envelope that returns a message whose memory its sender cannot reach

_CLOSE_S = 1.0  # for calls that run when the process leaves

_PATIENCE_S = (1e6, 0.1)
"""How long the engine waits at a time; in the main thread (1) Ctrl-C is heard in between."""

_log = logs.logger("rpc")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode

_MAIN = threading.main_thread().ident

_kept: list[native.Inbox] = []
"""Inboxes that were closed: peers that do not know it yet still write into their memory."""


@dataclass(slots=True, eq=False)
class _Way:
    """A peer, and how it is reached.

    Attributes:
        process: Its memory, if it can be reached.
        shares: The same, if it can reach this process's memory, as far as is known.
        sent: How many messages were sent to it without a ring.
        lost: How it ended.
    """

    peer: Peer
    near: bool
    process: native.Process | None = None
    shares: native.Process | None = None
    outbox: native.Outbox | None = None
    sent: itertools.count[int] = field(default_factory=itertools.count)
    lost: str | None = None


class HostTransport(Transport, Told):
    """A `Transport` (see `envelope`) between processes that share a store.

    Args:
        inbox: This process's.
        peers: Who takes part.
        sockets: This process's; not started.
        slots: How many calls run at a time.
        shared_memory: False sends everything through sockets.
        leave: Called at the end.

    Threads: all methods may be called from any thread.
    """

    def __init__(
        self,
        inbox: native.Inbox,
        peers: Peers,
        sockets: Sockets,
        slots: int,
        shared_memory: bool = True,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox, self.peers, self._sockets = inbox, peers, sockets
        self._workers = Workers(inbox, self._sort, slots)
        self._shared_memory, self._leave = shared_memory, leave
        self._id, self._host = peers.own_id, peers.me.process.host_id
        self._ways: dict[int, _Way] = {}
        self._own: deque[tuple[Envelope, list[torch.Tensor]]] = deque()
        self._joining = threading.RLock()
        self._claiming = threading.Lock()
        self._closed = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        receiver.joined(self._id, self.peers.me.name)
        self.peers.watch(self._add, self._lost)
        self._sockets.start(self._id, self)
        self._workers.start()

    def look(self, to: str | int) -> None:
        peer = self.peers.named(to) if isinstance(to, str) else self.peers.find(to)
        if peer is not None:
            self._add(peer)

    def send(self, to: int, envelope: Envelope, memories: Sequence[torch.Tensor]) -> None:
        if to == self._id:
            self._own.append((envelope, [own(memory) for memory in memories]))
            self._inbox.post(_OWN)
            return
        try:
            way = self._ways[to]
        except KeyError:
            way = self._way(to)
        if way is None or way.lost is not None:
            raise PeerLost(f"process {to} is gone", peer=to, seen=(way and way.lost) or "")
        process = way.shares
        if process is None:
            self._send_through_socket(way, envelope, memories)
            return
        if memories:
            envelope.memories = tuple([give(process, memory) for memory in memories])
        packed = _encode(envelope)
        if len(packed) > _RING_BYTES:
            packed = self._short(process, packed)
        outbox = way.outbox or self._claim(way, process)
        if outbox is None or not outbox.send(packed):
            self._sockets.send(to, way.peer.endpoint, way.near, packed, ())

    def ticket(self) -> Waiter:
        return native.Ticket()

    def complete(self, ticket: Any) -> None:
        self._inbox.complete(ticket)

    def wait(self, ticket: Any, seconds: float = inf) -> bool:
        deadline = inf if seconds == inf else time.monotonic() + seconds
        patience_s = _PATIENCE_S[threading.get_ident() == _MAIN]
        aside = self._workers.step_aside()
        try:
            while not ticket.done:
                left_s = patience_s
                if deadline != inf:
                    left_s = min(max(0.0, deadline - time.monotonic()), patience_s)
                message = self._inbox.next(ticket, left_s)
                if message is None and left_s:
                    continue
                if type(message) is not bytes:
                    break
                work = self._sort(message)
                if work is not None:
                    self._workers.submit(work)
        finally:
            if aside:
                self._workers.step_back()
        return ticket.done

    def submit(self, work: Work) -> None:
        self._workers.submit(work)

    def close(self, known: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        self._workers.join(_CLOSE_S)
        if not (known or self.peers.logged):
            for way in list(self._ways.values()):
                if way.lost is None:
                    self._take_leave(way)
        self._sockets.close()
        self.peers.close()
        self._leave()
        _kept.append(self._inbox)
        for way in self._ways.values():
            way.outbox = way.process = way.shares = None

    def _take_leave(self, way: _Way) -> None:
        """Tell a process that this one leaves, after all else."""
        peer, envelope = way.peer, Envelope(_LEAVING, self._id)
        if self._sockets.leads_to(peer.id):  # what is in its ring it reads first, but not these
            self._sockets.send(peer.id, peer.endpoint, way.near, _encode(envelope), ())
        else:
            with suppress(PeerLost):
                self.send(peer.id, envelope, ())

    # --- who is there ------------------------------------------------------------------------

    def _way(self, id: int) -> _Way | None:
        if id not in self._ways and (peer := self.peers.find(id)) is not None:
            self._add(peer)
        return self._ways.get(id)

    def _add(self, peer: Peer) -> None:
        with self._joining:
            if peer.id in self._ways:
                return
            way = _Way(peer, peer.process.host_id == self._host)
            if way.near and self._shared_memory:
                with suppress(OSError):  # another container, perhaps: its socket may do
                    way.process = way.shares = native.heap_peer(*peer.heap)
            self._receiver.joined(peer.id, peer.name)
            self._ways[peer.id] = way
        if way.near:
            self._watch(way)

    def _watch(self, way: _Way) -> None:
        """Begin to watch for the end of a process of this host."""
        process, ended = way.peer.process, partial(self._ended, way)
        try:
            self._sockets.watch(os.pidfd_open(process.pid), ended)
        except ProcessLookupError:
            pass
        except (OSError, AttributeError):  # the system, or Python, has none, or no descriptor left
            is_over = lambda: way.lost is not None or alive(process) is False  # noqa: E731
            self._sockets.look(is_over, ended)
        if alive(process) is False:  # since when its number may have been used again
            threading.Thread(target=ended, daemon=True).start()

    def _ended(self, way: _Way) -> None:
        """Take note that a process of this host has ended; may be told twice."""
        if way.lost is None:
            how = way.process.fate() if way.process is not None else ""
            self._read_ring_of(way, ended=True)
            self._sockets.finish(way.peer.id, lambda: self._end(way, how))
            self.peers.give_up(way.peer.id, how)

    def _lost(self, id: int, how: str) -> None:
        """Others, or itself, say that a process is gone, or others that this one is."""
        if self._closed:
            return
        if id == self._id:
            _log.error("the others have given this process up: %s", how)
            for way in list(self._ways.values()):
                self._end(way, f"it has given this process up ({how})")
            return
        way = self._ways.get(id)
        if way is None:  # gone before this process came: it has sent us nothing
            self._receiver.died(id, how)
            return
        self._sockets.finish(id, lambda: self._finished(way, how))

    def _finished(self, way: _Way, how: str) -> None:
        """Take note that a process has left; it may live on, so its ring stays its own."""
        self._read_ring_of(way, ended=False)
        self._end(way, how)

    def _read_ring_of(self, way: _Way, ended: bool) -> None:
        """Read what is in the rings now; free that of a process that has ended."""
        nobody = native.Ticket()
        while not (ended and self._inbox.forget(way.peer.process.pid)):
            message = self._inbox.next(nobody, 0.0)
            if not isinstance(message, bytes):
                break
            self._hand_over(message)
        if ended:
            self._inbox.forget(way.peer.process.pid)

    def _end(self, way: _Way, how: str) -> None:
        with self._claiming:
            if way.lost is not None or self._closed:
                return
            way.lost = how
            way.outbox = way.process = way.shares = None
        self._sockets.forget(way.peer.id)
        self._receiver.died(way.peer.id, how)

    # --- sending -----------------------------------------------------------------------------

    def _short(self, process: native.Process, packed: bytes) -> bytes:
        """Return a message that says where in this process's memory a long one lies."""
        count = len(packed)
        given = native.heap_give(count, process)
        if given is None:
            return packed
        memoryview(given)[:count] = packed
        there = Memory(offset=given.offset, nbytes=count)
        return _encode(Envelope(_ELSEWHERE, self._id, memories=(there,)))

    def _send_through_socket(
        self, way: _Way, envelope: Envelope, memories: Sequence[torch.Tensor]
    ) -> None:
        envelope.memories = tuple([describe(memory) for memory in memories])
        raw = [bytes_of(memory) for memory in memories if memory.nbytes > INLINE_BYTES]
        self._sockets.send(way.peer.id, way.peer.endpoint, way.near, _encode(envelope), raw)

    def _claim(self, way: _Way, process: native.Process) -> native.Outbox | None:
        """Ask for a ring: at once where there are enough for all, else for busy traffic."""
        if len(self._ways) > _RINGS and (next(way.sent) + 1) % _BUSY:
            return None
        with self._claiming:
            if way.outbox is None and way.shares is not None:
                way.outbox = native.Outbox.claim(process, way.peer.inbox)
            return way.outbox

    # --- receiving ---------------------------------------------------------------------------

    def _sort(
        self, message: bytes, raw: Sequence[torch.Tensor] = (), sender: int | None = None
    ) -> Work | None:
        """Tell of a message; return what a thread is to run for it.

        Args:
            message: As it was sent.
            raw: The memories that came through a socket.
            sender: From whom it came, if that is known; else it says so itself.
        """
        try:
            if message == _OWN:
                return self._receiver.receive(*self._own.popleft())
            envelope = _decode(message)
            way = self._ways.get(envelope.sender) or self._way(envelope.sender)
            if way is None:
                raise ValueError(f"a message of a process {envelope.sender} that nobody knows")
            if sender not in (None, envelope.sender):
                raise ValueError(f"a message of {envelope.sender} from {sender}")
            if way.lost is not None:
                return None
            if envelope.kind == _LEAVING:
                self._lost(way.peer.id, LEFT)
                return None
            if envelope.kind == _UNREAD:
                self._send_again(way, envelope.body.pickled)
                return None
            process = way.process
            if process is None and any(row.offset >= 0 for row in envelope.memories):
                returned = Envelope(_UNREAD, self._id, body=Body(message))
                self._send_through_socket(way, returned, ())
                return None
            if envelope.kind == _ELSEWHERE:
                envelope = _read_elsewhere(process, envelope)
            for row in envelope.body.references:  # whose owner may have joined just now
                if row.owner != self._id:
                    self._way(row.owner)
            memories: list[torch.Tensor] = []
            if envelope.memories:
                rest = iter(raw)
                memories = [
                    next(rest) if row.nbytes and row.offset < 0 else _read_memory(process, row)
                    for row in envelope.memories
                ]
            return self._receiver.receive(envelope, memories)
        except Exception:
            _log.exception("a message could not be read")
            return None

    def _send_again(self, way: _Way, message: bytes) -> None:
        """Send a message again whose receiver cannot reach this process's memory.

        Only a process of this host returns one: another has been sent no offset in this memory, and
        would read with those that it has made up.
        """
        if way.process is None:
            raise ValueError(f"{way.peer.id} returns a message that had no shared memory")
        with self._claiming:
            way.outbox = way.shares = None
        envelope, own_memory = _decode(message), native.heap_peer(*self.peers.me.heap)
        if envelope.sender != self._id:
            raise ValueError(f"a message of {envelope.sender} was returned to {self._id}")
        if envelope.kind == _ELSEWHERE:
            envelope = _read_elsewhere(own_memory, envelope)
        memories = [_read_memory(own_memory, row) for row in envelope.memories]
        self._send_through_socket(way, envelope, memories)

    def _hand_over(
        self, message: bytes, raw: Sequence[torch.Tensor] = (), sender: int | None = None
    ) -> None:
        """Deal with a message in a thread that runs no calls."""
        work = self._sort(message, raw, sender)
        if work is not None:
            self._workers.submit(work)

    # --- what the sockets tell ---------------------------------------------------------------

    def message(self, sender: int, body: bytes, memories: list[torch.Tensor]) -> None:
        self._hand_over(body, memories, sender)

    def broken(self, peer: int) -> None:
        way = self._ways.get(peer)
        if way is not None and way.lost is None and not self._closed:
            self._receiver.broken(peer)

    def unreachable(self, peer: int) -> None:
        way, how = self._ways[peer], "it could not be reached"
        self._end(way, how)
        self.peers.give_up(peer, how)


def _read_elsewhere(process: native.Process | None, envelope: Envelope) -> Envelope:
    """Return the message that is in the memory of the process that has sent it."""
    assert process is not None
    there = envelope.memories[0]
    return _decode(memoryview(native.heap_take(process, there.offset, there.nbytes)))


def _read_memory(process: native.Process | None, row: Memory) -> torch.Tensor:
    """Return memory that came with a message, or that the process has given."""
    if row.offset >= 0:
        assert process is not None
        return take(process, row)
    if not row.data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(row.data), dtype=torch.uint8)
