"""Messages between processes through sockets: between hosts, and within one as a fallback.

Every process has one ROUTER socket, to which all others connect, and opens one DEALER socket per
peer when it first sends something to it. A connection carries messages in one direction; answers
return through a connection that the answering process opens. Keys are derived from the job key
(`store.router`). One thread serves all sockets; other threads append messages to queues and wake
it. A message is cut into frames, each a ZeroMQ message, so that ZeroMQ never holds a large message:
frames are sent from the sender's copy, and received into the memory that the receiver will use.

A connection is opened once. Attempts are repeated until the peer has answered; a peer of another
host that does not answer for some time is reported as unreachable. So is a peer whose connection
breaks, in either direction: messages under way may be lost, and are not resent. A process that
answers and exits breaks both connections, and the one to it may break before its answer was read
from the other. So a break is reported after `_FINISH_S`, in which messages that have arrived are
read and the reason may become known (`transport`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import zmq

from dure.errors import StoreError
from dure.rpc.failures import malformed_message
from dure.store.key import JobKey
from dure.store.listener import Listener
from dure.store.monitored import MonitoredSocket
from dure.store.router import GuardedRouter, Guarding
from dure.store.silence import ListeningClock, silence_s
from dure.store.wire import FRAME_LIMIT, MAX_FRAME_BYTES
from dure.trace import logs

__all__ = ["Assembly", "Sockets", "frames_of"]

_GUARDING = Guarding(what="rpc", waiting_requests=32, waiting_replies=1)
_WAITING_FRAMES = 32  # per connection, in ZeroMQ's memory
_BURST = 64  # frames of one connection before other connections are served
_PAUSE_S = 0.1  # between two attempts to connect
_BUSY_S = 1.0  # for which this thread may be busy; more counts as a pause of this process
_CLOSE_S = 1.0  # for queued messages to be sent when this process leaves
_FINISH_S = 1.0  # for all connections of a process to be closed, after its end or a break
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


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a connection: the world that the sender belongs to, and its id."""

    world: str
    sender: int


class _Opening(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a message: its body, and the sizes of the memories that follow."""

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
    """Joins the frames of one connection to messages."""

    def __init__(self) -> None:
        self._packed: bytearray | None = None  # an incomplete opening
        self._body = b""
        self._memories: list[torch.Tensor] = []
        self._open: deque[memoryview] = deque()  # to be filled by the next frames

    def take(self, frame: bytes) -> tuple[bytes, list[torch.Tensor]] | None:
        """Add the next frame; return body and memories (uint8) if it completes a message.

        Raises:
            ValueError: The frame does not continue the frames before it.
        """
        part = memoryview(frame)
        if not self._open:
            length = int.from_bytes(part[:_HEAD_BYTES], "little")
            if length > _MOST_OPENING_BYTES:
                raise ValueError("the frame does not begin a message")
            self._packed = bytearray(length)
            self._open.append(memoryview(self._packed))
            part = part[_HEAD_BYTES:]
        target, count = self._open.popleft(), len(part)
        if not 0 < count <= len(target):
            raise ValueError("the frame is empty, or longer than the rest of its message")
        target[:count] = part
        if count < len(target):
            self._open.appendleft(target[count:])
        elif self._packed is not None:
            opening, self._packed = _read_opening(self._packed), None
            if min(opening.memories, default=0) < 0:
                raise ValueError("a memory has a negative size")
            self._body = opening.body
            self._memories = [
                torch.empty(n, dtype=torch.uint8, device="cpu") for n in opening.memories
            ]
            self._open.extend(memory.numpy().data for memory in self._memories if len(memory))
        if self._open:
            return None
        memories, self._memories = self._memories, []
        return self._body, memories


@dataclass(slots=True, eq=False)
class _Incoming:
    """A connection from a peer; if `sender` is None, its frames are ignored."""

    sender: int | None
    assembly: Assembly = field(default_factory=Assembly)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A connection to a peer. Any thread appends to `queue`; the rest is the sockets' thread's.

    Attributes:
        near: Whether the peer is on this host.
        frame: The frame that ZeroMQ has not accepted yet.
        link: The socket, if the connection is open or being opened.
        since: When the first attempt to open it began, by the sockets' clock.
    """

    peer: int
    endpoint: str
    near: bool
    queue: deque[tuple[bytes, Sequence[bytes]]] = field(
        default_factory=deque[tuple[bytes, Sequence[bytes]]]
    )
    frames: Iterator[bytes | memoryview] = field(default_factory=lambda: iter(()))
    frame: bytes | memoryview | None = None
    link: MonitoredSocket | None = None
    open: bool = False
    since: float = 0.0
    retry_at: float = 0.0


class Sockets:
    """The sockets of a process.

    Args:
        listener: Where other processes connect.
        key: The job key; if None, nothing is encrypted and every client is admitted.
        world: A name that all processes of this world have, and no others.
        unreachable_s: How long to try to reach a process of another host; if None, as long as a
            host may be silent.

    Threads:
        Any, except that `start` is called once.

    Raises:
        StoreError: The process cannot listen there.
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
        self._posted: deque[_Outgoing | Callable[[], None]] = deque()  # for the thread
        self._connections: dict[int, _Outgoing] = {}
        self._closed: set[_Outgoing] = set()  # to be opened
        self._broken: dict[int, float] = {}  # by peer: until when the report of a break is delayed
        self._monitors: dict[zmq.Socket[bytes], _Outgoing] = {}
        self._full: set[_Outgoing] = set()  # whose sockets accept no more frames now
        self._incoming: dict[bytes, _Incoming] = {}
        self._finishing: dict[int, tuple[float, Callable[[], None]]] = {}
        self._watched: dict[Any, Callable[[], None]] = {}  # by descriptor
        self._poller = zmq.Poller()
        self._ends_at: float | None = None
        self._clock = ListeningClock()  # measures how long processes are unreachable
        self._thread = threading.Thread(target=self._run, name="dure-rpc-sockets", daemon=True)

    def start(
        self,
        own_id: int,
        receive: Callable[[bytes, Sequence[torch.Tensor], int], None],
        unreachable: Callable[[int], None],
    ) -> None:
        """Start to receive and to send.

        Args:
            own_id: The id of this process.
            receive: Called with the body, the memories and the sender of each message.
            unreachable: Called with a process to which no connection could be opened, or with which
                one broke. Both are called in the sockets' thread, and return quickly.
        """
        self._receive, self._unreachable = receive, unreachable
        self._hello = _HELLO + _pack(_Hello(self._world, own_id))
        self._thread.start()

    def send(
        self, to: int, endpoint: str, near: bool, body: bytes, memories: Sequence[bytes]
    ) -> None:
        """Queue a message for the process `to`, which listens at `endpoint`."""
        known = self._connections.get(to)
        out = known or self._connections.setdefault(to, _Outgoing(to, endpoint, near))
        out.queue.append((body, memories))
        self._post(out)

    def finish(self, peer: int, then: Callable[[], None]) -> None:
        """Call `then` in the sockets' thread when all messages of an ended process were read."""
        self._post(lambda: self._finish(peer, then))

    def watch(self, descriptor: int, then: Callable[[], None]) -> None:
        """Call `then` in the sockets' thread when a descriptor is readable, and close it."""
        self._post(lambda: self._watch_descriptor(descriptor, then))

    def forget(self, peer: int) -> None:
        """Close the connection to a process, and drop its queue."""
        self._post(lambda: self._forget(peer))

    def close(self) -> None:
        """Send what is queued, for at most `_CLOSE_S`, and close all sockets."""
        self._ends_at = time.monotonic() + _CLOSE_S
        self._post(lambda: None)
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, item: _Outgoing | Callable[[], None]) -> None:
        """Have the thread send a connection's queue, or call a function."""
        self._posted.append(item)
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
                    _log.exception("the sockets' thread continues after an error")
        finally:
            self._end()

    def _end(self) -> None:
        self._guarded.close()
        for out in list(self._connections.values()):
            self._shut(out)
        self._context.destroy(linger=int(_CLOSE_S * 1000))
        for descriptor in self._watched:
            os.close(descriptor)
        self._waker.close()
        self._wakened.close()

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        waits = any(
            (out.queue or out.frame) and (out.open or (out.near and out.link is not None))
            for out in self._connections.values()
        )
        return not (waits or self._posted) or time.monotonic() >= self._ends_at

    def _patience_ms(self) -> int:
        now = time.monotonic()
        dues = [out.retry_at if out.link is None else now + _PAUSE_S for out in self._closed]
        dues += [until for until, _ in self._finishing.values()]
        dues += self._broken.values()
        if self._ends_at is not None:
            dues.append(self._ends_at)
        return int(max(0.0, min((*dues, now + _LONGEST_POLL_S)) - now) * 1000) + bool(dues)

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        self._awake = False
        while self._posted:
            item = self._posted.popleft()
            if not isinstance(item, _Outgoing):
                item()
            elif item.open:
                self._pump(item)
            elif not item.since and self._connections.get(item.peer) is item:
                item.since = self._clock.now()
                self._closed.add(item)
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
        for monitor, out in [each for each in self._monitors.items() if each[0] in ready]:
            self._handle_events(out, monitor)
        for out in [out for out in self._full if out.link and out.link.socket in ready]:
            self._pump(out)
        self._handle_timeouts()

    def _watch_descriptor(self, descriptor: int, then: Callable[[], None]) -> None:
        self._watched[descriptor] = then
        self._poller.register(descriptor, zmq.POLLIN)

    def _handle_timeouts(self) -> None:
        now = time.monotonic()
        for out in list(self._closed):
            if not out.near and self._clock.now() >= out.since + self._unreachable_s:
                self._closed.discard(out)
                self._unreachable(out.peer)
            elif out.link is None and now >= out.retry_at:
                self._connect(out)
        for peer in [peer for peer, until in self._broken.items() if now >= until]:
            self._read_all()
            del self._broken[peer]
            self._unreachable(peer)
        for peer, (until, then) in list(self._finishing.items()):
            if now >= until:
                del self._finishing[peer]
                then()

    # --- receiving ---------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Read the frames that have arrived; few more if frames keep arriving."""
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
                frame = b""  # no process of Dure sends several parts
            try:
                self._take(client, frame)
            except Exception as error:  # of a faulty process, or of another version
                known = self._incoming.get(client)
                malformed = malformed_message(known.sender if known else None, error)
                _log.error("a connection is ignored from now on: %s", malformed, exc_info=error)
                self._incoming[client] = _Incoming(None)

    def _take(self, client: bytes, frame: bytes) -> None:
        incoming = self._incoming.get(client)
        if incoming is None:
            if frame[:1] != _HELLO:
                raise ValueError("the connection does not begin with a hello")
            hello = _read_hello(memoryview(frame)[1:])
            known = hello.world == self._world
            self._incoming[client] = _Incoming(hello.sender if known else None)
        elif incoming.sender is not None:
            complete = incoming.assembly.take(frame)
            if complete is not None:
                self._receive(*complete, incoming.sender)

    def _gone(self, client: bytes) -> None:
        incoming = self._incoming.pop(client, None)
        if incoming is None or incoming.sender is None:
            return
        if incoming.sender not in self._finishing:
            self._broke(incoming.sender)
        elif not self._comes_from(incoming.sender):
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

    def _connect(self, out: _Outgoing) -> None:
        try:
            link = MonitoredSocket(self._context, _EVENTS, FRAME_LIMIT, between_hosts=not out.near)
            with link.closed_on_error():
                link.socket.reconnect_ivl, link.socket.sndhwm = -1, _WAITING_FRAMES
                link.use_key(self._key, "rpc")
                link.connect(out.endpoint)
        except zmq.ZMQError as error:
            _log.warning("no connection to %s can be made: %s", out.endpoint, error)
            out.retry_at = time.monotonic() + _PAUSE_S
            return
        out.link = link
        self._monitors[link.monitor] = out
        self._poller.register(link.monitor, zmq.POLLIN)

    def _handle_events(self, out: _Outgoing, monitor: zmq.Socket[bytes]) -> None:
        link = out.link
        while link is not None and link is out.link and link.monitor is monitor:
            event = link.event()
            if event is None:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                out.open = True
                self._closed.discard(out)
                out.frames = iter((self._hello,))
                self._pump(out)
            elif out.open:
                self._shut(out)
                self._broke(out.peer)
            else:
                self._shut(out)
                out.retry_at = time.monotonic() + _PAUSE_S

    def _broke(self, peer: int) -> None:
        """Report soon that a connection from or to a process broke."""
        self._broken.setdefault(peer, time.monotonic() + _FINISH_S)

    def _shut(self, out: _Outgoing) -> None:
        """Close the socket of a connection, if it has one."""
        self._stop_waiting(out)
        link, out.link = out.link, None
        if link is not None:
            del self._monitors[link.monitor]
            self._poller.unregister(link.monitor)
            link.close(0 if self._ends_at is None else int(_CLOSE_S * 1000))
        out.open, out.frames, out.frame = False, iter(()), None

    def _pump(self, out: _Outgoing) -> None:
        """Send frames until ZeroMQ accepts no more."""
        assert out.link is not None
        socket = out.link.socket
        for _ in range(_BURST):
            if out.frame is None:
                out.frame = next(out.frames, None)
            if out.frame is None:
                if not out.queue:
                    self._stop_waiting(out)
                    return
                out.frames = frames_of(*out.queue.popleft())
                continue
            try:
                socket.send(out.frame, zmq.NOBLOCK)
            except zmq.Again:
                break
            out.frame = None
        if out not in self._full:
            self._full.add(out)
            self._poller.register(socket, zmq.POLLOUT)

    def _stop_waiting(self, out: _Outgoing) -> None:
        """Stop waiting until ZeroMQ accepts more frames."""
        if out in self._full and out.link is not None:
            self._full.discard(out)
            self._poller.unregister(out.link.socket)

    def _forget(self, peer: int) -> None:
        self._broken.pop(peer, None)
        out = self._connections.pop(peer, None)
        if out is not None:
            self._closed.discard(out)
            out.queue.clear()
            self._shut(out)
