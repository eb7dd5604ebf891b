"""A ROUTER socket that only members of the job reach, and that knows its connections.

Next to the socket there are two more: the ZAP socket, on which ZeroMQ asks whether a client that
has completed the CURVE handshake may come in (RFC 27: only the one public key that is derived from
the job key may), and the monitor, which reports connections that open, close or are refused. The
store's server has one router, and every process of RPC has one.

A client that has no key fails in the handshake, so none of its bytes is parsed here. It can
occupy one descriptor for `HANDSHAKE_S` and one frame of 64 KiB (see `wire`). There is no limit
on how many clients may be in the handshake at once: a large job connects all its ranks at the same
moment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import zmq
from zmq.utils import z85

from dure.store.key import JobKey
from dure.store.listener import BACKLOG, Listener
from dure.store.wire import FRAME_LIMIT
from dure.trace import logs

__all__ = ["GuardedRouter", "Guarding", "RefusalLog", "read_event"]

HANDSHAKE_S = 10.0
"""How long a handshake may take before ZeroMQ closes the connection."""

QUIET_S = 10.0
"""The shortest time between two log lines about refused connections."""

_MAX_DESCRIPTORS = 65_536
_FOREIGN = "it has another job key, or speaks another protocol (DURE_INSECURE on one side only?)"
_REASONS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: _FOREIGN,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _FOREIGN,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it left in the middle of the handshake, as a port scan "
    "does, or did not complete it in time",
}
_EVENTS = sum(_REASONS, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
_EVENT = struct.Struct("=hi")

_log = logs.logger("store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """The settings of a guarded socket.

    Attributes:
        what: Its name, for messages, and for the keys of its two sides ("store server").
        waiting_requests: How many messages of one client ZeroMQ keeps for this process; the
            client's own kernel keeps the rest.
        waiting_replies: How many are kept for a client that does not read them.
    """

    what: str
    waiting_requests: int
    waiting_replies: int


class RefusalLog:
    """Log lines about refused connections: the first at once, then at most one per `QUIET_S`.

    Args:
        where: The server, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_unreported, self._reported_at = 0, float("-inf")

    def add(self, peer: str, reason: str) -> None:
        """Log a refusal, or only count it for the next line."""
        now = time.monotonic()
        if now < self._reported_at + QUIET_S:
            self._num_unreported += 1
            return
        more = f" and {self._num_unreported} before it" if self._num_unreported else ""
        _log.warning("%s refused %s%s: %s", self._where, peer, more, reason)
        self._num_unreported, self._reported_at = 0, now


class GuardedRouter:
    """The three sockets, and the connections that are open. One thread at a time.

    Args:
        context: ZeroMQ's. It belongs to this socket alone, because a context has one ZAP socket.
        listener: Where to listen.
        key: The job key; None admits every client.
        guarding: The settings.

    Attributes:
        socket: The ROUTER.
        members: The ZeroMQ identities of the clients that have sent something, by descriptor.
        refusals: What to log about the others.

    Raises:
        zmq.ZMQError: It cannot listen there.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: Listener,
        key: JobKey | None,
        guarding: Guarding,
    ) -> None:
        self.members: dict[int, bytes] = {}
        self.refusals = RefusalLog(f"the {guarding.what} at {listener.endpoint}")
        self._clients: set[bytes] = set()
        self._joining: dict[int, str] = {}  # names by descriptor
        self._reason = _FOREIGN  # of the connection that is closed next
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self.socket = router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = FRAME_LIMIT
        router.handshake_ivl = int(1000 * HANDSHAKE_S)
        router.backlog = BACKLOG
        router.rcvhwm, router.sndhwm = guarding.waiting_requests, guarding.waiting_replies
        router.router_mandatory = True  # an error for clients that do not read their replies
        router.tcp_keepalive, router.tcp_keepalive_idle = 1, 60
        router.ipv6 = "[" in listener.endpoint
        self._admitted = b""
        if key is not None:
            self._admitted = z85.decode(key.pair(f"{guarding.what} client").public)
            router.curve_server = True
            key.arm(router, f"{guarding.what} server")
            router.zap_domain = b"dure"
            if listener.endpoint.startswith("ipc://") and hasattr(zmq, "IPC_FILTER_UID"):
                router.set(zmq.IPC_FILTER_UID, os.getuid())  # other users are not even accepted
        router.monitor("inproc://monitor", _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # ZeroMQ's I/O thread must never wait for this one
        self._monitor.connect("inproc://monitor")
        if listener.fd >= 0:
            router.use_fd = listener.fd
        router.bind(listener.endpoint)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll; `serve` handles all but the ROUTER."""
        return self.socket, self._zap, self._monitor

    def serve(self, ready: dict[Any, int]) -> Iterator[bytes]:
        """Admit clients; yield the identities of the members that have left."""
        if self._monitor in ready:
            while self._monitor.poll(0):
                client = self._event(*read_event(self._monitor))
                if client:
                    yield client
        if self._zap in ready:
            while self._zap.poll(0):  # all of them: a thousand ranks may connect at once
                self._admit()

    def receive(self, client: bytes) -> bytes:
        """Receive the first frame of a message of `client`, whose identity has been received."""
        if client in self._clients:
            return self.socket.recv()
        first = self.socket.recv(copy=False)
        fd: int = first.get(zmq.SRCFD)  # pyright: ignore[reportAssignmentType]
        if self._joining.pop(fd, None) is not None:  # else the connection is gone already
            self.members[fd] = client
            self._clients.add(client)
        return first.bytes

    def close(self) -> None:
        """Stop the monitor, before the context is destroyed."""
        self.socket.disable_monitor()

    def _event(self, event: int, value: int) -> bytes:
        """Handle an event of the monitor; return the identity of a member that has left, or b""."""
        if event == zmq.Event.ACCEPTED:
            self._joining[value] = _peer_of(value)
            _have_descriptors_for(len(self._joining) + len(self.members))
        elif event in _REASONS:
            self._reason = _REASONS[zmq.Event(event)]
        elif value in self.members:
            client = self.members.pop(value)
            self._clients.discard(client)
            return client
        elif value in self._joining:
            self.refusals.add(self._joining.pop(value), self._reason)
            self._reason = _FOREIGN
        return b""

    def _admit(self) -> None:
        """Answer ZeroMQ's question about one client that has proved its public key (RFC 27)."""
        frames = self._zap.recv_multipart()
        number, mechanism, credentials = frames[1], frames[5], frames[6:]
        known = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and compare_digest(credentials[0], self._admitted)
        )
        verdict = (b"200", b"OK") if known else (b"400", b"another job key")
        self._zap.send_multipart([b"1.0", number, *verdict, b"", b""])


def read_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Receive one event of a socket's monitor; return which (see `zmq.Event`) and its value.

    PyZMQ has a reader of its own, but that one imports asyncio, which costs every process 20 ms.

    Raises:
        zmq.ZMQError: The monitor is closed.
    """
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value


def _peer_of(fd: int) -> str:
    """Return a name for the other end of a connection, which ZeroMQ may have closed by now."""
    with (
        contextlib.suppress(OSError),
        socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as probe,
    ):
        name = probe.getpeername()
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this host"
    return "a peer that has hung up"


def _have_descriptors_for(connections: int) -> None:
    """Raise the soft limit of descriptors when connections take a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and 4 * connections >= soft and most > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
