"""A ROUTER socket that only members of the job reach, and that knows who is connected.

Beside the socket there are two more: one on which ZeroMQ asks whether a client that has completed
the CURVE handshake may come in (RFC 27: only the one public key derived from the job key may), and
the monitor, which tells who connects, leaves or is refused. The store's server has one, and every
process of RPC.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import zmq
from zmq.utils import z85

from dure.store import tracker
from dure.store.key import JobKey
from dure.store.listener import BACKLOG, Listener
from dure.store.tracker import ConnectionTracker, read_event
from dure.store.wire import FRAME_LIMIT

__all__ = ["GuardedRouter", "Guarding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """What a guarded socket is to be.

    Attributes:
        what: Its name, for people, and for the keys of its two sides ("store server").
        waiting_requests: How many messages of one client ZeroMQ keeps for us; a client's own
            kernel keeps the rest.
        waiting_replies: How many are kept for a client that does not read them.
    """

    what: str
    waiting_requests: int
    waiting_replies: int


class GuardedRouter:
    """The three sockets. One thread at a time.

    Args:
        context: ZeroMQ's; it is this socket's alone, for a context has one who admits clients.
        listener: Where to listen.
        key: The job key; None lets everybody in.
        guarding: What it is to be.

    Attributes:
        socket: The ROUTER.
        peers: Its connections.

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
        self.peers = ConnectionTracker(listener.endpoint, listener.port, f"the {guarding.what}")
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self.socket = router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = FRAME_LIMIT
        router.handshake_ivl = int(1000 * tracker.HANDSHAKE_S)
        router.backlog = BACKLOG
        router.rcvhwm, router.sndhwm = guarding.waiting_requests, guarding.waiting_replies
        router.router_mandatory = True  # so that we learn of those that do not read
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
        events = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
        events |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        router.monitor("inproc://monitor", events)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # ZeroMQ's I/O thread must never wait for this one
        self._monitor.connect("inproc://monitor")
        if listener.fd >= 0:
            router.use_fd = listener.fd
        router.bind(listener.endpoint)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        """What is to be polled; `serve` deals with all but the ROUTER."""
        return self.socket, self._zap, self._monitor

    def serve(self, ready: dict[Any, int]) -> Iterator[bytes]:
        """Let in who may come in; return the identities of the clients that have left."""
        if self._monitor in ready:
            while self._monitor.poll(0):
                gone = self.peers.event(*read_event(self._monitor))
                if gone:
                    yield gone
        if self._zap in ready:
            self._admit()

    def receive(self, client: bytes) -> bytes:
        """Receive the first frame of a message of `client`, whose identity has been received."""
        if client in self.peers.clients:
            return self.socket.recv()
        first = self.socket.recv(copy=False)
        self.peers.admit(client, first.get(zmq.SRCFD))  # pyright: ignore[reportArgumentType]
        return first.bytes

    def close(self) -> None:
        """Stop watching, before the context is destroyed."""
        self.socket.disable_monitor()

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
