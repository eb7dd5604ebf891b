"""How messages reach the other processes of the job.

**Within a host** a message goes through a ring in the receiver's shared memory
(`csrc/core/inbox.h`), which any free thread of the receiver reads. The memory of tensors is copied
once, by the sender, into memory of its heap that belongs to the receiver from then on; so is a
message that is too long for a ring. A process has 16 rings for the processes that send to it. If a
ring is full, or all are taken, the message goes through a socket, so a sender never waits for a
receiver.

**Between hosts** all messages go through sockets (`sockets`). A process that cannot map the memory
of another on its host (a limit of address space) cannot take part with it.

**Deaths.** The kernel reports processes of this host that end, by their pidfds; if there are none,
a thread polls. Processes of other hosts are gone if a connection to or from them breaks
or cannot be opened, or if others have reported them (`peers`). A process that leaves reports that
itself: in the log, or, if there is none, in a last message. Messages of a process are read before
the program learns that it is gone; one that a thread is handling at that moment may be dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import msgspec
import torch

from dure import native
from dure.errors import PeerLost, RpcError
from dure.rpc.failures import malformed_message
from dure.rpc.memory import INLINE_BYTES, MemoryRow, bytes_of, describe, give, own, take
from dure.rpc.message import FutureCompletion, RpcMessage, Work
from dure.rpc.peers import LEFT, PeerAddress, Peers
from dure.rpc.sockets import Sockets
from dure.rpc.workers import Workers
from dure.store.identity import alive
from dure.trace import logs

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["HostTransport"]

_RING_BYTES = 16 << 10
"""Messages above this size travel as memory do."""

_TO_SELF = b"\xc0"  # in the inbox, represents the next message in `HostTransport._to_self`
_ELSEWHERE = -1  # the type of a message that contains only the address of a long message
_LEAVING = -2  # the type of the last message of a process

_CLOSE_S = 1.0  # for running calls to end when this process leaves
_LOOK_S = 0.2  # between two checks of a process that has no pidfd

_PATIENCE_S = (1e6, 0.1)
"""How long the engine waits at a time; in the main thread (1) Ctrl-C is handled in between."""

_log = logs.logger("rpc")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RpcMessage).decode

_MAIN = threading.main_thread().ident

_kept: list[native.Inbox] = []
"""Closed inboxes: peers that have not noticed yet still write into their memory."""


@dataclass(slots=True, eq=False)
class _Route:
    """How a peer is reached.

    Attributes:
        near: Whether it is on this host.
        process: Its memory, if it is on this host.
        lost: How it ended.
    """

    peer: PeerAddress
    near: bool
    process: native.Process | None = None
    outbox: native.Outbox | None = None
    lost: str | None = None


class HostTransport:
    """Carries messages between processes that share a store.

    Args:
        inbox: This process's.
        peers: The processes of this world.
        sockets: This process's; not started.
        slots: How many calls run at a time.
        shared_memory: If False, all messages go through sockets.
        leave: Called once at the end.

    Threads:
        All methods may be called from any thread.
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
        self._workers = Workers(inbox, self._handle, slots)
        self._shared_memory, self._leave = shared_memory, leave
        self._id, self._host = peers.own_id, peers.me.process.host_id
        self._routes: dict[int, _Route] = {}
        self._to_self: deque[tuple[RpcMessage, list[torch.Tensor]]] = deque()
        self._joining = threading.RLock()
        self._claiming = threading.Lock()
        self._closed = False

    def start(self, receiver: RpcAgent) -> None:
        """Start to receive; `joined` is called for all known processes before this returns.

        The methods of `receiver` that this object calls return quickly: `joined`, `receive`, whose
        result is run as a call, in order of arrival and as far as there are free slots, and `died`,
        once for each process that is gone for good, after its last message.
        """
        self._receiver = receiver
        receiver.joined(self._id, self.peers.me.name)
        self.peers.watch(self._add, self._lost)
        self._sockets.start(self._id, self._hand_over, self.unreachable)
        self._workers.start()

    def look(self, to: str | int) -> None:
        """Check whether a process of that name or id has joined; if so, `joined` is called."""
        peer = self.peers.named(to) if isinstance(to, str) else self.peers.find(to)
        if peer is not None:
            self._add(peer)

    def send(
        self,
        to: int,
        message: RpcMessage,
        memories: Sequence[torch.Tensor],
        patient: bool = False,
    ) -> native.Outbox | None:
        """Send a message; the memories (contiguous) are copied before this returns.

        Never waits for the receiver. A process may send to itself.

        Args:
            to: The receiver.
            message: The message.
            memories: The memory of its tensors.
            patient: Whether this thread will wait for the answer, with the result of this method.

        Returns:
            If `patient`, through what the message went; None if it needs no care.

        Raises:
            PeerLost: The process is known to be gone.
        """
        if to == self._id:
            self._to_self.append((message, [own(memory) for memory in memories]))
            self._inbox.post(_TO_SELF)
            return None
        try:
            route = self._routes[to]
        except KeyError:
            route = self._route(to)
        if route is None or route.lost is not None:
            raise PeerLost(f"process {to} is gone", peer=to, seen=(route and route.lost) or "")
        process = route.process
        if process is None:
            self._send_through_socket(route, message, memories)
            return None
        if memories:
            message.memories = tuple([give(process, memory) for memory in memories])
        packed = _encode(message)
        if len(packed) > _RING_BYTES:
            packed = self._short(process, packed)
        outbox = route.outbox or self._claim(route, process)
        if outbox is None or not outbox.send(packed, patient):
            self._sockets.send(to, route.peer.endpoint, route.near, packed, ())
        return outbox if patient else None

    def ticket(self) -> native.Ticket:
        """Return a new event."""
        return native.Ticket()

    def complete(self, ticket: native.Ticket) -> None:
        """Set an event."""
        self._inbox.complete(ticket)

    def wait(
        self, ticket: native.Ticket, seconds: float = inf, asked: native.Outbox | None = None
    ) -> bool:
        """Wait for an event, and receive messages in that time.

        Code of the program is left to other threads, and a thread that runs a call gives its slot
        to another call while it waits.

        Args:
            ticket: The event.
            seconds: How long.
            asked: What `send` returned for the message whose answer sets the event.

        Returns:
            Whether the event was set; False after `seconds`, or if the transport was closed.
        """
        deadline = inf if seconds == inf else time.monotonic() + seconds
        patience_s = _PATIENCE_S[threading.get_ident() == _MAIN]
        aside = self._workers.step_aside()
        try:
            while not ticket.done:
                left_s = patience_s
                if deadline != inf:
                    left_s = min(max(0.0, deadline - time.monotonic()), patience_s)
                packed = self._inbox.next(ticket, left_s, asked)
                if packed is None and left_s:
                    continue
                if type(packed) is not bytes:
                    break
                work = self._handle(packed)
                if type(work) is FutureCompletion:
                    self._receiver.caller.complete_soon()
                elif work is not None:
                    self._workers.submit(work)
        finally:
            if aside:
                self._workers.step_back()
        return ticket.done

    def submit(self, work: Work) -> None:
        """Run work in one of the transport's threads, as if it were a call."""
        self._workers.submit(work)

    def close(self, known: bool = False) -> None:
        """Stop receiving; returns when no call runs, or soon after.

        Args:
            known: Whether all others know that this process ends, so that it need not notify them.
        """
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        self._workers.join(_CLOSE_S)
        if not (known or self.peers.logged):
            for route in list(self._routes.values()):
                if route.lost is None:
                    self._take_leave(route)
        self._sockets.close()
        self.peers.close()
        self._leave()
        _kept.append(self._inbox)
        for route in self._routes.values():
            route.outbox = route.process = None

    def _take_leave(self, route: _Route) -> None:
        """Notify a process that this one leaves, by a socket: it reads its ring before that."""
        message = _encode(RpcMessage(_LEAVING, self._id))
        self._sockets.send(route.peer.id, route.peer.endpoint, route.near, message, ())

    # --- the other processes ------------------------------------------------------------------

    def _route(self, id: int) -> _Route | None:
        if id not in self._routes and (peer := self.peers.find(id)) is not None:
            self._add(peer)
        return self._routes.get(id)

    def _add(self, peer: PeerAddress) -> None:
        with self._joining:
            if peer.id in self._routes:
                return
            route, problem = _Route(peer, peer.process.host_id == self._host), ""
            if route.near and self._shared_memory:
                try:
                    route.process = native.heap_peer(*peer.heap)
                except OSError as error:
                    problem = f"its memory cannot be mapped: {error}"
                    if not self.peers.logged and alive(peer.process):
                        fix = "Raise the limit of address space (ulimit -v)."
                        raise RpcError(problem, peer=peer.id, seen=str(peer), fix=fix) from None
            self._receiver.joined(peer.id, peer.name)
            self._routes[peer.id] = route
        if route.near:
            self._watch(route)
        if problem:
            self._give_up(route, problem)

    def _watch(self, route: _Route) -> None:
        """Have `_ended` called when a process of this host ends."""
        process = route.peer.process
        with suppress(OSError, AttributeError):  # ended, not supported, or too many descriptors
            self._sockets.watch(os.pidfd_open(process.pid), partial(self._ended, route))
            if alive(process) is not False:  # else its number may belong to another process
                return
        threading.Thread(target=self._poll, args=(route,), daemon=True).start()

    def _poll(self, route: _Route) -> None:
        """Call `_ended` soon after a process has ended; runs in its own thread."""
        while alive(route.peer.process) is not False:
            if route.lost is not None or self._closed:
                return
            time.sleep(_LOOK_S)
        self._ended(route)

    def _ended(self, route: _Route) -> None:
        """Handle that a process of this host has ended; may be called twice."""
        if route.lost is None:
            how = route.process.fate() if route.process is not None else ""
            self._read_ring_of(route, ended=True)
            self._sockets.finish(route.peer.id, lambda: self._end(route, how))
            self.peers.give_up(route.peer.id, how)

    def _lost(self, id: int, how: str) -> None:
        """Handle that a process has left, or that others have given it, or this one, up."""
        if self._closed:
            return
        if id == self._id:
            _log.error("the others have given this process up: %s", how)
            for route in list(self._routes.values()):
                self._end(route, f"it has given this process up ({how})")
            return
        route = self._routes.get(id)
        if route is None:  # gone before this process joined
            self._receiver.died(id, how)
            return

        def finished() -> None:
            self._read_ring_of(route, ended=False)  # it may still run, so it keeps its ring
            self._end(route, how)

        self._sockets.finish(id, finished)

    def _read_ring_of(self, route: _Route, ended: bool) -> None:
        """Handle the messages in the rings; free the ring of a process that has ended."""
        never_done = native.Ticket()
        while not (ended and self._inbox.forget(route.peer.process.pid)):
            packed = self._inbox.next(never_done, 0.0)
            if not isinstance(packed, bytes):
                break
            self._hand_over(packed)
        if ended:
            self._inbox.forget(route.peer.process.pid)

    def _end(self, route: _Route, how: str) -> None:
        with self._claiming:
            if route.lost is not None or self._closed:
                return
            route.lost = how
            route.outbox = route.process = None
        self._sockets.forget(route.peer.id)
        self._receiver.died(route.peer.id, how)

    def _give_up(self, route: _Route, how: str) -> None:
        """End a process that this one cannot exchange messages with."""
        if route.lost is not None or self._closed:
            return
        if not (route.near and alive(route.peer.process) is False):  # else `_ended` handles that
            self._end(route, how)
            self.peers.give_up(route.peer.id, how)

    # --- sending -----------------------------------------------------------------------------

    def _short(self, process: native.Process, packed: bytes) -> bytes:
        """Copy a long message to this process's heap; return a message with its address."""
        count = len(packed)
        given = native.heap_give(count, process)
        if given is None:
            return packed
        memoryview(given)[:count] = packed
        there = MemoryRow(offset=given.offset, nbytes=count)
        return _encode(RpcMessage(_ELSEWHERE, self._id, memories=(there,)))

    def _send_through_socket(
        self, route: _Route, message: RpcMessage, memories: Sequence[torch.Tensor]
    ) -> None:
        message.memories = tuple([describe(memory) for memory in memories])
        raw = [bytes_of(memory) for memory in memories if memory.nbytes > INLINE_BYTES]
        self._sockets.send(route.peer.id, route.peer.endpoint, route.near, _encode(message), raw)

    def _claim(self, route: _Route, process: native.Process) -> native.Outbox | None:
        """Claim a ring of a process; None if all are taken."""
        with self._claiming:
            if route.outbox is None and route.process is not None:
                route.outbox = native.Outbox.claim(process, route.peer.inbox)
            return route.outbox

    # --- receiving ---------------------------------------------------------------------------

    def _handle(
        self, packed: bytes, raw: Sequence[torch.Tensor] = (), sender: int | None = None
    ) -> Work | None:
        """Handle a message; return the call to run for it, if any.

        Args:
            packed: The message.
            raw: The memories that came through a socket.
            sender: The process at the other end of the socket; None for rings.
        """
        message: RpcMessage | None = None
        try:
            if packed == _TO_SELF:
                return self._receiver.receive(*self._to_self.popleft())
            message = _decode(packed)
            route = self._routes.get(message.sender) or self._route(message.sender)
            if route is None:
                raise ValueError(f"there is no worker {message.sender}")
            if sender not in (None, message.sender):
                raise ValueError(f"it claims to be from worker {message.sender}")
            if route.lost is not None:
                return None
            if message.kind == _LEAVING:
                self._lost(route.peer.id, LEFT)
                return None
            process = route.process
            if message.kind == _ELSEWHERE:
                message = _read_elsewhere(process, message)
            for row in message.body.references:  # the owner may have just joined
                if row.owner != self._id:
                    self._route(row.owner)
            memories: list[torch.Tensor] = []
            if message.memories:
                rest = iter(raw)
                memories = [
                    next(rest) if row.nbytes and row.offset < 0 else _read_memory(process, row)
                    for row in message.memories
                ]
            return self._receiver.receive(message, memories)
        except Exception as error:
            if sender is None and message is not None:
                sender = message.sender
            malformed = malformed_message(sender, error)
            _log.error("a message is ignored: %s", malformed, exc_info=error)
            return None

    def _hand_over(
        self, packed: bytes, raw: Sequence[torch.Tensor] = (), sender: int | None = None
    ) -> None:
        """Handle a message in a thread that runs no calls."""
        work = self._handle(packed, raw, sender)
        if work is not None:
            self._workers.submit(work)

    def unreachable(self, peer: int) -> None:
        """Handle that no connection to a process could be opened, or that one broke."""
        route = self._routes.get(peer)
        if route is not None:
            self._give_up(route, "it could not be reached")


def _read_elsewhere(process: native.Process | None, message: RpcMessage) -> RpcMessage:
    """Return the long message that is in the memory of its sender."""
    if process is None:
        raise ValueError("an address in the memory of another host")
    there = message.memories[0]
    return _decode(memoryview(native.heap_take(process, there.offset, there.nbytes)))


def _read_memory(process: native.Process | None, row: MemoryRow) -> torch.Tensor:
    """Return memory that came with a message, or that the process has given."""
    if row.offset >= 0:
        if process is None:
            raise ValueError("an address in the memory of another host")
        return take(process, row)
    if not row.data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(row.data), dtype=torch.uint8)
