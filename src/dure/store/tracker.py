"""The connections of a store's server: who has proved to be a member, and how many have not.

ZeroMQ accepts connections on a thread of its own, without a limit on those that never complete the
handshake. Each costs a descriptor of a process that needs them for the job. So the server follows
its socket's events here. A connection is a *stranger's* until a request has come from it; members
ask one thing at once. ZeroMQ ends a handshake after `HANDSHAKE_S`. Of more than `MOST` strangers
the oldest of the address that has the most is shut, so who floods the server takes the room from
himself. What was refused is told in one line at once, then in one every `QUIET_S`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

from dure.trace import logs

__all__ = ["HANDSHAKE_S", "MOST", "QUIET_S", "ConnectionTracker", "close_inherited", "read_event"]

HANDSHAKE_S = 10.0
MOST = 512
QUIET_S = 10.0

_EVENT = struct.Struct("=hi")
_WANTED_DESCRIPTORS = 65_536
_OTHER_KEY = "it has another job key"
_FOREIGN = "it does not speak our protocol"
_PROTOCOL_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one of us talks in the clear, the other does not "
    "(DURE_INSECURE on one side only?)",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: _OTHER_KEY,
}

_log = logs.logger("store")


class ConnectionTracker:
    """The connections of one server, as its socket's monitor tells of them. One thread at a time.

    Args:
        endpoint: Where the server listens.
        port: The same as a number; 0 for a Unix socket.
        what: Its name, for people.

    Attributes:
        strangers: Who they are (host, port), by descriptor, the oldest first.
        members: Their ZeroMQ identities, by descriptor.
        clients: The identities alone.
    """

    def __init__(self, endpoint: str, port: int, what: str = "the store") -> None:
        self._endpoint, self._port, self._what = endpoint, port, what
        self.strangers: dict[int, tuple[str, int]] = {}
        self.members: dict[int, bytes] = {}
        self.clients: set[bytes] = set()
        self._shut: set[int] = set()
        self._reason = _FOREIGN
        self._unsaid, self._said, self._last = 0, float("-inf"), ("", "")

    def admit(self, client: bytes, fd: int) -> None:
        """Note that a request came from `client`, through the descriptor `fd`."""
        if self.strangers.pop(fd, None) is not None:  # else the connection is gone already
            self.members[fd] = client
            self.clients.add(client)

    def event(self, event: int, value: int) -> bytes:
        """Take an event of the monitor; return the identity of a member who has left, or b""."""
        if event == zmq.Event.ACCEPTED:
            self.strangers[value] = _peer_of(value, self._port)
            _have_descriptors_for(len(self.strangers) + len(self.members))
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._reason = _OTHER_KEY
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._reason = _PROTOCOL_REASONS.get(value, _FOREIGN)
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._reason = (
                "it left in the middle of the handshake, as a port scan does, or did not complete "
                "it in time"
            )
        elif value in self.members:
            client = self.members.pop(value)
            self.clients.discard(client)
            return client
        elif value in self.strangers:
            if value in self._shut:
                self._reason = "it did not complete the handshake while many others tried"
            self._shut.discard(value)
            host, port = self.strangers.pop(value)
            self.refused(f"{host}:{port}" if port else host, self._reason)
            self._reason = _FOREIGN
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
        waiting = {fd: peer for fd, peer in self.strangers.items() if fd not in self._shut}
        while len(waiting) > MOST:
            crowd = Counter(host for host, _ in waiting.values()).most_common(1)[0][0]
            fd = next(fd for fd, (host, _) in waiting.items() if host == crowd)
            self._shut.add(fd)
            self._shut_down(fd, waiting.pop(fd))
        if self._unsaid and now >= self._said + QUIET_S:
            name, reason = self._last
            more = f" and {self._unsaid - 1} more" if self._unsaid > 1 else ""
            who = name or "a peer that has hung up"
            where = f"{self._what} at {self._endpoint}"
            _log.warning("%s refused %s%s: %s", where, who, more, reason)
            self._unsaid, self._said, self._last = 0, now, ("", "")

    def _shut_down(self, fd: int, peer: tuple[str, int]) -> None:
        """Shut a connection, if the number still means that one; ZeroMQ finds it closed."""
        with contextlib.suppress(OSError), _socket_behind(fd) as probe:
            if _peer_of(fd, self._port) == peer:
                probe.shutdown(socket.SHUT_RDWR)


def read_event(monitor: zmq.Socket[Any], flags: int = 0) -> tuple[int, int]:
    """Receive one event of a socket's monitor; return which (see `zmq.Event`) and its value.

    PyZMQ has a reader of its own, but it brings asyncio along, which costs every process 20 ms.

    Raises:
        zmq.ZMQError: The monitor is closed, or with `zmq.NOBLOCK` nothing is there.
    """
    event, value = _EVENT.unpack(monitor.recv_multipart(flags)[0])
    return event, value


def close_inherited(descriptors: list[int], port: int) -> None:
    """In a forked child: close those of `descriptors` that are sockets of the parent's server."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            with _socket_behind(fd) as probe:
                ours = _is_at(probe, port)
            if ours:
                os.close(fd)


@contextlib.contextmanager
def _socket_behind(fd: int) -> Iterator[socket.socket]:
    """Look at a descriptor that may be closed by now, or be something else, through a duplicate.

    Raises:
        OSError: It is no socket.
    """
    copy = os.dup(fd)
    try:
        probe = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with probe:
        yield probe


def _is_at(probe: socket.socket, port: int) -> bool:
    name = probe.getsockname()
    return name[1] == port if isinstance(name, tuple) else port == 0


def _peer_of(fd: int, port: int) -> tuple[str, int]:
    """Return who is at the other end; nobody if ZeroMQ has closed the connection by now."""
    with contextlib.suppress(OSError), _socket_behind(fd) as probe:
        if _is_at(probe, port):
            name = probe.getpeername()
            return name[:2] if isinstance(name, tuple) else ("a process of this host", 0)
    return "", 0


def _have_descriptors_for(connections: int) -> None:
    """Raise the soft limit of descriptors when connections take a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and 4 * connections >= soft and most > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
