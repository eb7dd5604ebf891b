"""A line: the connection between the leaders of two hosts, and the words that go down it.

It is a ZeroMQ connection beside the engine's, encrypted with CURVE keys that are made for the group
and exchanged through its store; who does not know them cannot connect. The leader of the lower host
listens. As soon as the one leader that it is for has come, the line's port is closed to everybody
else. Every word carries the line's token, so that nothing of another line or group is believed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid.fate import Verdict
from dure.store.address import resolve
from dure.store.listener import listen
from dure.store.packets import let_nobody_in

__all__ = ["BEAT_S", "SILENCE_S", "Line", "Word", "open_line"]

BEAT_S = 1.0
SILENCE_S = 3.0
_LINGER_MS = 100
_LONGEST_WORD = 1 << 18
_HANDSHAKE_MS = 10_000


class Word(msgspec.Struct, array_like=True):
    """What one leader says to another.

    `asked` is an operation for which time is up, or 0; `left` is -1 unless the leader leaves.
    """

    token: bytes = b""
    begun: int = 0
    opened: int = 0
    asked: int = 0
    left: int = -1
    verdict: Verdict | None = None


class _Contact(msgspec.Struct, array_like=True):
    """How a leader can be reached by one other."""

    endpoint: str
    public: bytes
    token: bytes


@dataclass(slots=True, eq=False)
class Line:
    """A connection to the leader of `host`, and what was heard of it."""

    host: int
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    token: bytes = b""
    door: int | None = None  # the listening socket's descriptor, which ZeroMQ closes
    heard: float = field(default_factory=time.monotonic)
    greeted: bool = False
    begun: int = 0
    opened: int = 0
    left: int = -1
    over: bool = False
    lost: float | None = None  # when the leader was lost, or left
    fell_silent: bool = False  # nothing says that its host has died

    def say(self, word: Word) -> None:
        """Send a word, if anybody is there: else silence or the monitor will tell."""
        word.token = self.token
        with contextlib.suppress(zmq.Again):
            self.socket.send(msgspec.msgpack.encode(word), zmq.NOBLOCK)

    def words(self) -> Iterator[Word]:
        """Read all that has come."""
        while True:
            try:
                word = msgspec.msgpack.decode(self.socket.recv(zmq.NOBLOCK), type=Word)
            except zmq.Again:
                return
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if secrets.compare_digest(word.token, self.token):
                yield word

    def close_door(self) -> None:
        """Let nobody else in; where the system cannot, the handshake alone keeps strangers out."""
        if self.door is not None:
            with (
                contextlib.suppress(OSError),
                sockets.socket(fileno=os.dup(self.door)) as listener,
            ):
                let_nobody_in(listener)

    def close(self) -> None:
        """Close, with a moment for what was said last."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0 if self.over else _LINGER_MS)


def open_line(
    context: zmq.Context[zmq.Socket[bytes]],
    hosts: tuple[int, int],
    address: str,
    options: BackendOptions,
) -> Line:
    """Open the line between two leaders; both call.

    Args:
        context: ZeroMQ's.
        hosts: The number of this host, and that of the other.
        address: Where this host can be reached.
        options: What the group is.

    Raises:
        StoreTimeout: The other did not say where it listens.
    """
    here, host = hosts
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = ":" in address
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.heartbeat_ivl = int(1000 * BEAT_S)
    socket.heartbeat_timeout = int(1000 * SILENCE_S)
    socket.maxmsgsize, socket.handshake_ivl = _LONGEST_WORD, _HANDSHAKE_MS
    line = Line(host, socket, context.socket(zmq.PAIR), secrets.token_bytes(16))
    monitor = f"inproc://line-{host}"
    socket.monitor(monitor, zmq.Event.DISCONNECTED)
    line.monitor.connect(monitor)
    key = f"lines/{min(host, here)}/{max(host, here)}"
    try:
        if here < host:
            _listen(line, address, public, lambda contact: options.store.set(key, contact))
        else:
            options.store.wait([key], options.timeout)
            _call(line, options.store.get(key))
    except BaseException:
        line.close()  # ZeroMQ's context waits for it
        raise
    return line


def _listen(line: Line, address: str, public: bytes, tell: Callable[[bytes], None]) -> None:
    line.socket.curve_server = True
    listener = listen(resolve(address, 0, "this host's address"))
    line.door = listener.fd
    line.socket.use_fd = listener.fd
    line.socket.bind(listener.endpoint)
    tell(msgspec.msgpack.encode(_Contact(listener.endpoint, public, line.token)))


def _call(line: Line, told: bytes) -> None:
    contact = msgspec.msgpack.decode(told, type=_Contact)
    line.socket.ipv6 = "[" in contact.endpoint
    line.socket.curve_serverkey = contact.public
    line.socket.connect(contact.endpoint)
    line.token = contact.token
