"""The connections of a store's server: who has proved to be a member, and how many have not.

ZeroMQ accepts connections, and lets in who completes the CURVE handshake, on a thread of its own,
without a limit on those that never do. Each costs a descriptor of a process that needs them for
the job. So the server follows its socket's events here. A connection is *unauthenticated* until a
request has come from it; members ask one thing at once after the handshake. ZeroMQ ends one that
has not completed it after `HANDSHAKE_S`. Of more than `MOST` the oldest of the address that has the
most is shut, so who floods the server takes the room from himself. What was refused is told in one
line at once, then in one every `QUIET_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections import Counter
from typing import NamedTuple

import zmq

from dure.store.monitor import socket_behind

__all__ = ["HANDSHAKE_S", "MOST", "QUIET_S", "ConnectionTracker", "close_inherited"]

HANDSHAKE_S = 10.0
MOST = 512
QUIET_S = 10.0

_WANTED_DESCRIPTORS = 65_536
_REASONS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it has another job key",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it left in the middle of the handshake, as a port scan "
    "does, or did not complete it in time",
}
_PROTOCOL_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one of us talks in the clear, the other does not "
    "(DURE_INSECURE on one side only?)",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another job key",
}
_FOREIGN = "it does not speak our protocol"
_CROWDED = "it did not complete the handshake while many others tried"

_log = logging.getLogger("dure.store")


class _Peer(NamedTuple):
    host: str
    name: str  # the host and port; "" if it left before it could be asked


class ConnectionTracker:
    """The connections of one server, as its socket's monitor tells of them. One thread at a time.

    Args:
        endpoint: Where the server listens.
        port: The same as a number; 0 for a Unix socket.
    """

    def __init__(self, endpoint: str, port: int) -> None:
        self._endpoint, self._port = endpoint, port
        self._strangers: dict[int, _Peer] = {}  # by descriptor, the oldest first
        self._members: dict[int, bytes] = {}
        self._fds: dict[bytes, int] = {}
        self._shut: set[int] = set()
        self._reason = ""
        self._unsaid, self._said, self._last = 0, float("-inf"), ("", "")

    @property
    def handshake_ms(self) -> int:
        """How long ZeroMQ may wait for a handshake to complete."""
        return int(1000 * HANDSHAKE_S)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of all connections."""
        return [*self._strangers, *self._members]

    @property
    def empty(self) -> bool:
        """Whether nobody is connected."""
        return not self._strangers and not self._members

    @property
    def unauthenticated(self) -> int:
        """How many connections there are from which no request has come."""
        return len(self._strangers)

    def knows(self, client: bytes) -> bool:
        """Tell whether a request of `client` has been seen before."""
        return client in self._fds

    def admit(self, client: bytes, fd: int) -> None:
        """Note that a request came from `client`, through the descriptor `fd`."""
        if self._strangers.pop(fd, None) is not None:  # else the connection is gone already
            self._members[fd], self._fds[client] = client, fd

    def event(self, event: int, value: int) -> bytes:
        """Take an event of the monitor; return the identity of a member who has left, or b""."""
        if event == zmq.Event.ACCEPTED:
            self._strangers[value] = _peer_of(value, self._port)
            _have_descriptors_for(len(self._strangers) + len(self._members))
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._reason = _PROTOCOL_REASONS.get(value, _FOREIGN)
        elif event != zmq.Event.DISCONNECTED:
            self._reason = _REASONS[zmq.Event(event)]
        elif value in self._members:
            client = self._members.pop(value)
            self._fds.pop(client, None)
            return client
        elif value in self._strangers:
            reason = _CROWDED if value in self._shut else self._reason or _FOREIGN
            self._shut.discard(value)
            self.refused(self._strangers.pop(value).name, reason)
            self._reason = ""
        return b""

    def refused(self, name: str, reason: str) -> None:
        """Count a refusal, of which `tidy` tells."""
        self._unsaid += 1
        self._last = (name or self._last[0], reason)

    def due(self) -> float | None:
        """Return when `tidy` is next needed."""
        return self._said + QUIET_S if self._unsaid else None

    def tidy(self, now: float) -> None:
        """Shut the connections that are too many, and say who was refused, if it is time."""
        waiting = {fd: peer for fd, peer in self._strangers.items() if fd not in self._shut}
        while len(waiting) > MOST:
            host = Counter(peer.host for peer in waiting.values()).most_common(1)[0][0]
            fd = next(fd for fd, peer in waiting.items() if peer.host == host)
            self._shut.add(fd)
            _shut(fd, waiting.pop(fd), self._port)
        if self._unsaid and now >= self._said + QUIET_S:
            name, reason = self._last
            more = f" and {self._unsaid - 1} more" if self._unsaid > 1 else ""
            who = name or "somebody who had left already"
            _log.warning("the store at %s refused %s%s: %s", self._endpoint, who, more, reason)
            self._unsaid, self._said, self._last = 0, now, ("", "")

    def close(self) -> None:
        """Say what has not been said yet."""
        self.tidy(float("inf"))


def close_inherited(descriptors: list[int], port: int) -> None:
    """In a forked child: close those of `descriptors` that are sockets of the parent's server."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            with socket_behind(fd) as probe:
                ours = _is_at(probe, port)
            if ours:
                os.close(fd)


def _is_at(probe: socket.socket, port: int) -> bool:
    name = probe.getsockname()
    return name[1] == port if isinstance(name, tuple) else port == 0


def _peer_of(fd: int, port: int) -> _Peer:
    """Return who is at the other end; nobody if ZeroMQ has closed the connection by now."""
    with contextlib.suppress(OSError), socket_behind(fd) as probe:
        if _is_at(probe, port):
            name = probe.getpeername()
            if isinstance(name, tuple):
                return _Peer(str(name[0]), f"{name[0]}:{name[1]}")
            return _Peer("", "a process of this host")
    return _Peer("", "")


def _shut(fd: int, peer: _Peer, port: int) -> None:
    """Shut a connection, if the number still means that one; ZeroMQ finds it closed."""
    with contextlib.suppress(OSError), socket_behind(fd) as probe:
        if _peer_of(fd, port) == peer:
            probe.shutdown(socket.SHUT_RDWR)


def _have_descriptors_for(connections: int) -> None:
    """Raise the soft limit of descriptors when connections take a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and 4 * connections >= soft and most > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
