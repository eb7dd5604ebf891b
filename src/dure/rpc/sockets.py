"""Messages between processes through sockets: between hosts, and where a host's memory will not do.

Every process has one ROUTER socket, on which all others reach it, and opens one DEALER a peer when
it first has something to say to it: a connection carries messages one way, answers go back through
the answerer's own. Keys are derived from the job's (`store.router`). One thread serves all sockets;
others leave messages for it, and wake it. A message travels in frames, each a ZeroMQ message of its
own, so that a large one is never in ZeroMQ's memory as a whole: it goes out of the sender's copy,
and into the memory that the receiver will use.

A connection is opened once. When it breaks, what waits to be sent through it is dropped, and both
ends are told, the receiver after all that came through it: what was under way may or may not have
arrived. A process that answers and leaves breaks both connections, and the one to it may be seen to
break before the answer was read from the other; so the break is reported when nothing can come from
the peer any more, or after `_FINISH_S`. The next message opens another connection. To a peer of
another host it is opened at once, for that alone shows whether the peer is still there; a peer that
cannot be reached for a while is reported to be lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
import zmq

from dure.errors import StoreError
from dure.store.address import is_refused
from dure.store.key import JobKey
from dure.store.listener import Listener
from dure.store.router import GuardedRouter, Guarding, read_event
from dure.store.silence import ListeningClock, end_after_silence, silence_s
from dure.store.wire import MAX_FRAME_BYTES
from dure.trace import logs

__all__ = ["Assembly", "Sockets", "Told", "frames_of"]

_GUARDING = Guarding(what="rpc", waiting_requests=32, waiting_replies=1)
_WAITING_FRAMES = 32  # of one connection, in ZeroMQ's memory
_BURST = 64  # frames of one connection before the others' turn
_PAUSE_S = 0.1  # between two attempts to connect
_REFUSED_S = 10.0  # how long a process is looked for whose port refuses connections
_BUSY_S = 1.0  # that this thread may be busy; longer is a pause of this process
_ASK_S = 2.0  # between two questions whether a port does
_CLOSE_S = 1.0  # for what waits to be sent when the process leaves
_LOOK_S = 0.2  # between two looks at processes that no descriptor stands for
_FINISH_S = 1.0  # for all connections of a process to be seen to break, when one did or it ended
_MOST_SOCKETS = 16_383
_LONGEST_POLL_S = 3600.0
_HELLO = b"\0"
_HEAD_BYTES = 8  # of a message: how long its opening is
_MOST_OPENING_BYTES = 1 << 32
_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
)

_log = logs.logger("rpc")
_numbers = itertools.count()


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a connection: for whom it is, and from whom."""

    world: str
    sender: int


class _Opening(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a message: its body, and how long the memories are that follow."""

    body: bytes
    memories: tuple[int, ...]


_pack = msgspec.msgpack.Encoder().encode
_read_hello = msgspec.msgpack.Decoder(_Hello).decode
_read_opening = msgspec.msgpack.Decoder(_Opening).decode


def frames_of(body: bytes, memories: Sequence[bytes]) -> Iterator[bytes | memoryview]:
    """Cut a message into frames of at most `MAX_FRAME_BYTES`."""
    opening = memoryview(_pack(_Opening(body, tuple(map(len, memories)))))
    first = MAX_FRAME_BYTES - _HEAD_BYTES
    yield len(opening).to_bytes(_HEAD_BYTES, "little") + opening[:first]
    for each in (opening[first:], *memories):
        view = memoryview(each)
        for at in range(0, len(view), MAX_FRAME_BYTES):
            yield view[at : at + MAX_FRAME_BYTES]


class Assembly:
    """Puts the frames of one connection together."""

    def __init__(self) -> None:
        self._packed: bytearray | None = None  # an opening that is not read yet
        self._body = b""
        self._memories: list[torch.Tensor] = []
        self._open: deque[memoryview] = deque()  # what the next frames fill

    def take(self, frame: bytes) -> tuple[bytes, list[torch.Tensor]] | None:
        """Take the next frame; return the message that it completes: body, memories (uint8).

        Raises:
            ValueError: It does not continue what came before.
        """
        part = memoryview(frame)
        if not self._open:
            length = int.from_bytes(part[:_HEAD_BYTES], "little")
            if length > _MOST_OPENING_BYTES:
                raise ValueError("a frame that begins no message")
            self._packed = bytearray(length)
            self._open.append(memoryview(self._packed))
            part = part[_HEAD_BYTES:]
        target, count = self._open.popleft(), len(part)
        if not 0 < count <= len(target):
            raise ValueError("a frame that is longer than what it belongs to, or empty")
        target[:count] = part
        if count < len(target):
            self._open.appendleft(target[count:])
        elif self._packed is not None:
            opening, self._packed = _read_opening(self._packed), None
            if min(opening.memories, default=0) < 0:
                raise ValueError("memory of negative length")
            self._body = opening.body
            self._memories = [
                torch.empty(n, dtype=torch.uint8, device="cpu") for n in opening.memories
            ]
            self._open.extend(memory.numpy().data for memory in self._memories if len(memory))
        if self._open:
            return None
        memories, self._memories = self._memories, []
        return self._body, memories


class Told(Protocol):
    """Who is told what happens, in the sockets' thread; returns quickly."""

    def message(self, sender: int, body: bytes, memories: list[torch.Tensor]) -> None:
        """A message came."""

    def broken(self, peer: int) -> None:
        """A connection from or to a process broke; all that came through it was told before."""

    def unreachable(self, peer: int) -> None:
        """A process of another host could not be reached for too long."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """A connection from a peer; `sender` None: what comes through it is ignored."""

    sender: int | None
    assembly: Assembly = field(default_factory=Assembly)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The way to a peer. Others append to `queue`; the rest is the sockets' thread's."""

    peer: int
    endpoint: str
    near: bool  # of this host
    queue: deque[tuple[bytes, Sequence[bytes]]] = field(
        default_factory=deque[tuple[bytes, Sequence[bytes]]]
    )
    frames: Iterator[bytes | memoryview] = field(default_factory=lambda: iter(()))
    frame: bytes | memoryview | None = None  # which ZeroMQ has not taken yet
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    open: bool = False
    since: float = 0.0  # when it was found closed, by the sockets' clock
    retry_at: float = 0.0
    refused: bool = False  # its host refuses connections there
    ask_at: float = 0.0


class Sockets:
    """The sockets of a process.

    Args:
        listener: Where others reach it.
        key: The job key; None talks in the clear to everybody.
        world: What all processes of the job have in common, and others have not.
        unreachable_s: How long a process of another host is looked for; None: as long as a host may
            be silent.

    Threads: any, but for `start`, which is called once.

    Raises:
        StoreError: It cannot listen there.
    """

    def __init__(
        self,
        listener: Listener,
        key: JobKey | None,
        world: str,
        unreachable_s: float | None = None,
    ) -> None:
        self.endpoint, self._key = listener.endpoint, key
        self._unreachable_s = silence_s() if unreachable_s is None else unreachable_s
        self._world, self._hello = world, b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        try:
            self._guarded = GuardedRouter(self._context, listener, key, _GUARDING)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StoreError(f"cannot listen on {listener.endpoint}", seen=str(error)) from None
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._awake = False
        self._left: deque[_Outgoing | Callable[[], None]] = deque()  # for the thread
        self._ways: dict[int, _Outgoing] = {}
        self._closed_ways: set[_Outgoing] = set()  # that are to be opened
        self._broken: dict[_Outgoing, float] = {}  # until when the report of a break is held back
        self._monitors: dict[zmq.Socket[bytes], _Outgoing] = {}
        self._full: set[_Outgoing] = set()  # that wait for ZeroMQ to take more
        self._incoming: dict[bytes, _Incoming] = {}
        self._finishing: dict[int, tuple[float, Callable[[], None]]] = {}
        self._watched: dict[Any, Callable[[], None]] = {}  # by descriptor
        self._looked_at: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._look_due = 0.0
        self._poller = zmq.Poller()
        self._ends_at: float | None = None
        self._clock = ListeningClock()  # for how long others are looked for
        self._thread = threading.Thread(target=self._run, name="dure-rpc-sockets", daemon=True)

    def start(self, own_id: int, told: Told) -> None:
        """Begin to receive and to send."""
        self._told, self._hello = told, _HELLO + _pack(_Hello(self._world, own_id))
        self._thread.start()

    def send(
        self, to: int, endpoint: str, near: bool, body: bytes, memories: Sequence[bytes]
    ) -> None:
        """Send a message to the process `to`, which listens at `endpoint`; returns at once."""
        way = self._ways.get(to) or self._ways.setdefault(to, _Outgoing(to, endpoint, near))
        way.queue.append((body, memories))
        self._leave(way)

    def leads_to(self, peer: int) -> bool:
        """Whether something was sent to a process."""
        return peer in self._ways

    def finish(self, peer: int, then: Callable[[], None]) -> None:
        """Call `then` in the sockets' thread, when all was read that a process has sent.

        The process has ended: its connections break, if they are not broken yet.
        """
        self._leave(lambda: self._finish(peer, then))

    def watch(self, descriptor: int, then: Callable[[], None]) -> None:
        """Call `then` in the sockets' thread when a descriptor can be read, and close it."""
        self._leave(lambda: self._watch_descriptor(descriptor, then))

    def look(self, happened: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` in the sockets' thread soon after `happened` has begun to return True."""
        self._leave(lambda: self._looked_at.append((happened, then)))

    def forget(self, peer: int) -> None:
        """Close the way to a process; what waits is dropped."""
        self._leave(lambda: self._forget(peer))

    def close(self) -> None:
        """Send what waits, as far as that takes no second, and end."""
        self._ends_at = time.monotonic() + _CLOSE_S
        self._leave(lambda: None)
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _leave(self, what: _Outgoing | Callable[[], None]) -> None:
        self._left.append(what)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):  # the thread has ended
                self._waker.send(b"!")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        for source in (*self._guarded.sources, self._wakened):
            self._poller.register(source, zmq.POLLIN)
        try:
            while not self._is_over():
                patience_ms = self._patience_ms()
                self._clock.turn(patience_ms / 1000 + _BUSY_S)
                ready = dict(self._poller.poll(patience_ms))
                self._clock.turn(_BUSY_S)
                try:
                    self._serve(ready)
                except Exception:
                    _log.exception("the sockets' thread goes on after an error")
        finally:
            self._end()

    def _end(self) -> None:
        self._guarded.close()
        for way in list(self._ways.values()):
            self._shut(way)
        self._context.destroy(linger=int(_CLOSE_S * 1000))
        for descriptor in self._watched:
            os.close(descriptor)
        self._waker.close()
        self._wakened.close()

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        waits = any(
            (way.queue or way.frame) and (way.open or (way.near and way.socket is not None))
            for way in self._ways.values()
        )
        return not (waits or self._left) or time.monotonic() >= self._ends_at

    def _patience_ms(self) -> int:
        now = time.monotonic()
        dues = [way.retry_at if way.socket is None else now + _PAUSE_S for way in self._closed_ways]
        dues += [until for until, _ in self._finishing.values()]
        dues += self._broken.values()
        if self._looked_at:
            dues.append(self._look_due)
        if self._ends_at is not None:
            dues.append(self._ends_at)
        return int(max(0.0, min((*dues, now + _LONGEST_POLL_S)) - now) * 1000) + bool(dues)

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        self._awake = False
        while self._left:
            left = self._left.popleft()
            if not isinstance(left, _Outgoing):
                left()
            elif left.open:
                self._pump(left)
            elif left in self._broken:
                continue  # what waits is dropped when the break is reported
            elif left.socket is None and self._ways.get(left.peer) is left:
                left.since = left.since or self._clock.now()
                self._closed_ways.add(left)
        for descriptor in ready.keys() & self._watched.keys():
            self._poller.unregister(descriptor)
            then = self._watched.pop(descriptor)
            os.close(descriptor)
            then()
        for gone in self._guarded.serve(ready):
            self._read_all()
            self._gone(gone)
        if self._guarded.socket in ready:
            self._read(_BURST)
        if self._broken:
            self._report_breaks()
        for monitor, way in [each for each in self._monitors.items() if each[0] in ready]:
            self._watch(way, monitor)
        for way in [way for way in self._full if way.socket in ready]:
            self._pump(way)
        self._look_at_the_clock()

    def _watch_descriptor(self, descriptor: int, then: Callable[[], None]) -> None:
        self._watched[descriptor] = then
        self._poller.register(descriptor, zmq.POLLIN)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for way in list(self._closed_ways):
            if not way.near and self._clock.now() >= way.since + self._patience_s(way):
                self._closed_ways.discard(way)
                self._told.unreachable(way.peer)
            elif way.socket is None and now >= way.retry_at:
                self._connect(way)
        for peer, (until, then) in list(self._finishing.items()):
            if now >= until:
                del self._finishing[peer]
                then()
        if self._looked_at and now >= self._look_due:
            self._look_due = now + _LOOK_S
            self._look()

    def _look(self) -> None:
        for one in list(self._looked_at):
            happened, then = one
            if happened():
                self._looked_at.remove(one)  # first: one that fails keeps no other from being seen
                then()

    def _patience_s(self, way: _Outgoing) -> float:
        """Return how long a process of another host is looked for."""
        return min(self._unreachable_s, _REFUSED_S) if way.refused else self._unreachable_s

    def _ask_host_of(self, way: _Outgoing) -> None:
        """Check every `_ASK_S`, in a thread, whether the port of a process refuses connections."""
        now = time.monotonic()
        if way.near or now < way.ask_at:
            return
        way.ask_at = now + _ASK_S

        def ask() -> None:
            refused = is_refused(way.endpoint)
            self._leave(lambda: setattr(way, "refused", refused and not way.open))

        threading.Thread(target=ask, name="dure-rpc-ask", daemon=True).start()

    # --- receiving ---------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Read what is there, and not much more if it never ends."""
        self._read(_GUARDING.waiting_requests * (1 + len(self._incoming)))

    def _read(self, most: int) -> None:
        router = self._guarded.socket
        for _ in range(most):
            try:
                client = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._guarded.receive(client)
            if router.rcvmore:
                router.recv_multipart()
                frame = b""  # nobody of ours sends several
            try:
                self._take(client, frame)
            except Exception:  # of a member with an error, or of another version
                _log.exception("what comes through a connection is ignored from now on")
                self._incoming[client] = _Incoming(None)

    def _take(self, client: bytes, frame: bytes) -> None:
        incoming = self._incoming.get(client)
        if incoming is None:
            if frame[:1] != _HELLO:
                raise ValueError("a connection that does not begin with a greeting")
            hello = _read_hello(memoryview(frame)[1:])
            known = hello.world == self._world
            self._incoming[client] = _Incoming(hello.sender if known else None)
        elif incoming.sender is not None:
            whole = incoming.assembly.take(frame)
            if whole is not None:
                self._told.message(incoming.sender, *whole)

    def _gone(self, client: bytes) -> None:
        incoming = self._incoming.pop(client, None)
        if incoming is None or incoming.sender is None:
            return
        self._told.broken(incoming.sender)
        if incoming.sender in self._finishing and not self._comes_from(incoming.sender):
            self._finishing.pop(incoming.sender)[1]()

    def _comes_from(self, peer: int) -> bool:
        return any(incoming.sender == peer for incoming in self._incoming.values())

    def _finish(self, peer: int, then: Callable[[], None]) -> None:
        self._read_all()
        if self._comes_from(peer):
            self._finishing[peer] = time.monotonic() + _FINISH_S, then
        else:
            then()

    # --- sending -----------------------------------------------------------------------------

    def _connect(self, way: _Outgoing) -> None:
        try:
            way.socket = out = self._context.socket(zmq.DEALER)
            way.monitor = self._context.socket(zmq.PAIR)
            out.linger, way.monitor.linger = 0, 0
            out.reconnect_ivl, out.sndhwm = -1, _WAITING_FRAMES
            out.ipv6 = "[" in way.endpoint
            if not way.near:
                end_after_silence(out)
            if self._key is not None:
                self._key.arm(out, "rpc client")
                out.curve_serverkey = self._key.pair("rpc server").public
            watch = f"inproc://monitor-{next(_numbers)}"
            out.monitor(watch, _EVENTS)
            way.monitor.connect(watch)
            out.connect(way.endpoint)
        except zmq.ZMQError as error:
            _log.warning("no connection to %s can be made: %s", way.endpoint, error)
            self._shut(way)
            way.retry_at = time.monotonic() + _PAUSE_S
            return
        self._monitors[way.monitor] = way
        self._poller.register(way.monitor, zmq.POLLIN)

    def _watch(self, way: _Outgoing, monitor: zmq.Socket[bytes]) -> None:
        while way.monitor is monitor and monitor.poll(0):
            event, _ = read_event(monitor)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                way.open, way.since, way.refused = True, 0.0, False
                self._closed_ways.discard(way)
                way.frames = iter((self._hello,))
                self._pump(way)
            elif way.open:
                self._break(way)
            else:
                self._shut(way)
                way.retry_at = time.monotonic() + _PAUSE_S
                self._ask_host_of(way)

    def _break(self, way: _Outgoing) -> None:
        self._shut(way)
        way.since = self._clock.now()
        self._broken[way] = time.monotonic() + _FINISH_S
        self._leave(lambda: None)  # the next turn sees what else had happened by now

    def _report_breaks(self) -> None:
        """Report the connections that broke to peers from which nothing can come any more."""
        self._read_all()
        now = time.monotonic()
        for way, until in list(self._broken.items()):
            may_come = self._comes_from(way.peer) or self._guarded.num_joining > 0
            if may_come and now < until:
                continue
            del self._broken[way]
            way.queue.clear()
            self._told.broken(way.peer)
            if not way.near and self._ways.get(way.peer) is way:
                way.retry_at = now
                self._closed_ways.add(way)

    def _shut(self, way: _Outgoing) -> None:
        """Close the sockets of a way, if it has any."""
        self._rest(way)
        if way.socket is not None:
            way.socket.disable_monitor()  # before nobody reads: ZeroMQ would wait for good to tell
        if way.monitor is not None:
            if self._monitors.pop(way.monitor, None) is not None:
                self._poller.unregister(way.monitor)
            way.monitor.close(0)
        if way.socket is not None:
            way.socket.close(0 if self._ends_at is None else int(_CLOSE_S * 1000))
        way.open, way.socket, way.monitor = False, None, None
        way.frames, way.frame = iter(()), None

    def _pump(self, way: _Outgoing) -> None:
        """Hand frames to ZeroMQ, as many as it takes."""
        assert way.socket is not None
        for _ in range(_BURST):
            if way.frame is None:
                way.frame = next(way.frames, None)
            if way.frame is None:
                if not way.queue:
                    self._rest(way)
                    return
                way.frames = frames_of(*way.queue.popleft())
                continue
            try:
                way.socket.send(way.frame, zmq.NOBLOCK)
            except zmq.Again:
                break
            way.frame = None
        if way not in self._full:
            self._full.add(way)
            self._poller.register(way.socket, zmq.POLLOUT)

    def _rest(self, way: _Outgoing) -> None:
        """No longer wait for ZeroMQ to take more."""
        if way in self._full:
            self._full.discard(way)
            self._poller.unregister(way.socket)

    def _forget(self, peer: int) -> None:
        way = self._ways.pop(peer, None)
        if way is not None:
            self._closed_ways.discard(way)
            self._broken.pop(way, None)
            way.queue.clear()
            self._shut(way)
