"""Who stands at a server's door: strangers are counted, kept few, and told of in one line.

ZeroMQ accepts connections, and lets in who completes the CURVE handshake, on a thread of its own.
It has no limit on connections that never do so, and each costs a descriptor and some memory of a
process that needs them for the job. The server therefore follows the socket's events here:

* A *stranger* is a connection from which no request has come. Members ask one thing at once after
  the handshake, so they are strangers for a few milliseconds only.
* More than `CROWD` strangers are not borne for longer than `PATIENCE_S`, more than `MOST` not at
  all: the oldest one of the address that has the most is *shown out*. So whoever floods the door
  from one place takes the room from himself, not from the ranks of other hosts.
* Showing out is `shutdown` on a duplicate of ZeroMQ's descriptor, once the duplicate has been
  seen to be that very connection: ZeroMQ may close the number at any moment, and the process may
  use it for something else.
* When a quarter of the descriptors that this process may have is taken by connections, the limit
  is raised as far as the system lets us. An ordinary job never gets there.

Refusals are put into the log by `Refusals`: one line for an address and a reason, then at most one
in ten seconds with how many there were, so that the log is no target either. Whose name is not
known yet, because he was quicker than the event of his arrival, is named by the kernel a moment
after (see `obituaries`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
from collections import Counter, deque
from dataclasses import dataclass, field

import zmq

from dure.store.monitor import socket_behind
from dure.store.obituaries import Obituaries

__all__ = ["CROWD", "HANDSHAKE_S", "MOST", "PATIENCE_S", "Door", "Refusals", "close_inherited"]

HANDSHAKE_S = 10.0
"""ZeroMQ closes a connection that has not completed the handshake by then."""

CROWD, PATIENCE_S = 64, 2.0
MOST = 512

_CREDENTIALS = struct.Struct("iII")  # of the process at the other end of a Unix socket
_NAMING_S = 0.25
"""How long we wait for the kernel to name one that has gone."""

_RECENT = 1024
_QUIET_S = 10.0
_MOST_LINES = 8
_MOST_TALLIES = 256
_FEW_DESCRIPTORS = 4
_WANTED_DESCRIPTORS = 65_536

_OTHER_KEY = "it has another job key"
_MECHANISM = "one of us talks in the clear, the other does not (DURE_INSECURE on one side only?)"
_FOREIGN = "it does not speak our protocol"
_LEFT = "it left in the middle of the handshake (a port scan does that, or one that died)"
_SLOW = "it did not complete the handshake in time"
_CROWDED = "it did not complete the handshake while many others stood at the door"
_UNKNOWN = "somebody who had left before the system could say who"

_PROTOCOL_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: _MECHANISM,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: _OTHER_KEY,
}

_log = logging.getLogger("dure.store")


@dataclass(slots=True)
class _Guest:
    """A connection: who it is, since when it is there, and, of a member, its ZeroMQ identity."""

    host: str
    peer: str
    since: float
    client: bytes = b""
    reason: str = ""


@dataclass(slots=True)
class _Tally:
    """What is known of the refusals of one address for one reason since the last line."""

    peer: str
    count: int = 0
    said: float = float("-inf")


@dataclass(slots=True)
class Refusals:
    """The log of refusals: few lines, whatever happens.

    Args:
        where: What refuses, such as "the store at tcp://10.0.0.1:29500".
    """

    where: str
    _tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict[tuple[str, str], _Tally])
    _window: float = float("-inf")
    _lines: int = 0
    _unsaid: int = 0
    _due: float | None = None

    def note(self, host: str, peer: str, reason: str, now: float) -> None:
        """Count one refusal, and say so if this address has been quiet."""
        tally = self._tallies.get((host, reason))
        if tally is None:
            if len(self._tallies) >= _MOST_TALLIES:
                self._unsaid += 1
                return
            tally = self._tallies[host, reason] = _Tally(peer)
            self._due = now + _QUIET_S if self._due is None else self._due
        tally.peer = peer
        tally.count += 1
        if tally.said == float("-inf"):
            self._say(reason, tally, now)

    def due(self) -> float | None:
        """Return when `flush` is next needed."""
        return self._due

    def flush(self, now: float) -> None:
        """Say how many came since, and forget addresses that have been quiet."""
        if self._due is None or now < self._due:
            return
        for key, tally in list(self._tallies.items()):
            if now - tally.said < _QUIET_S:
                continue
            if tally.count:
                self._say(key[1], tally, now)
            else:
                del self._tallies[key]
        if self._unsaid and now - self._window >= _QUIET_S:
            self._write_rest()
        dues = [tally.said + _QUIET_S for tally in self._tallies.values()]
        dues += [self._window + _QUIET_S] if self._unsaid else []
        self._due = min(dues, default=None)

    def last_words(self) -> None:
        """Say what has not been said; for the end of the server."""
        unsaid = [(key[1], tally) for key, tally in self._tallies.items() if tally.count]
        for reason, tally in unsaid[:_MOST_LINES]:
            self._write(reason, tally)
        self._unsaid += sum(tally.count for _, tally in unsaid[_MOST_LINES:])
        if self._unsaid:
            self._write_rest()
        self._tallies.clear()

    def _write_rest(self) -> None:
        _log.warning("%s refused %d more, of other addresses", self.where, self._unsaid)
        self._unsaid = 0

    def _say(self, reason: str, tally: _Tally, now: float) -> None:
        if now - self._window >= _QUIET_S:
            self._window, self._lines = now, 0
        tally.said = now
        self._lines += 1
        if self._lines > _MOST_LINES:
            self._unsaid += tally.count
        else:
            self._write(reason, tally)
        tally.count = 0

    def _write(self, reason: str, tally: _Tally) -> None:
        again = f" (and {tally.count - 1} times more)" if tally.count > 1 else ""
        _log.warning("%s refused %s%s: %s", self.where, tally.peer, again, reason)


class Door:
    """The connections of one server, as its socket's monitor tells of them. One thread at a time.

    Args:
        endpoint: Where the server listens.
        port: The same as a number; 0 for a Unix socket.
    """

    def __init__(self, endpoint: str, port: int) -> None:
        self.refusals = Refusals(f"the store at {endpoint}")
        self._port = port
        self._guests: dict[int, _Guest] = {}
        self._strangers: dict[int, _Guest] = {}  # the oldest first
        self._crowds: Counter[str] = Counter()
        self._fds: dict[bytes, int] = {}
        self._reason = ""
        self._nameless: deque[tuple[float, str]] = deque()  # when they left, and why
        self._named_gone: deque[str] = deque(maxlen=_RECENT)
        self._obituaries = _obituaries(port)

    @property
    def handshake_ms(self) -> int:
        """How long ZeroMQ may wait for a handshake to complete."""
        return int(1000 * HANDSHAKE_S)

    @property
    def fd(self) -> int | None:
        """A descriptor to poll: when it can be read, call `hear`."""
        return None if self._obituaries is None else self._obituaries.fd

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of all connections."""
        return list(self._guests)

    @property
    def empty(self) -> bool:
        """Whether nobody is connected."""
        return not self._guests

    @property
    def strangers(self) -> int:
        """How many connections there are from which nothing has come yet."""
        return len(self._strangers)

    def knows(self, client: bytes) -> bool:
        """Tell whether a request of `client` has been seen before."""
        return client in self._fds

    def admit(self, client: bytes, fd: int) -> None:
        """Note that a request came from `client`, through the descriptor `fd`."""
        guest = self._guests.get(fd)
        if guest is None:  # the connection is gone already
            return
        if self._strangers.pop(fd, None) is not None:
            self._leave_crowd(guest)
        self._fds.pop(guest.client, None)
        guest.client = client
        self._fds[client] = fd

    def event(self, event: int, value: int, now: float) -> bytes:
        """Take an event of the monitor; returns the identity of a member who has left, or b""."""
        if event == zmq.Event.ACCEPTED:
            self._enter(value, now)
        elif event == zmq.Event.DISCONNECTED:
            return self._left(value, now)
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._reason = _OTHER_KEY
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._reason = _PROTOCOL_REASONS.get(value, _FOREIGN)
        else:  # HANDSHAKE_FAILED_NO_DETAIL; the DISCONNECTED that names it follows
            self._reason = _LEFT
        return b""

    def due(self) -> float | None:
        """Return when `tidy` is next needed."""
        due = self.refusals.due()
        if self._nameless:
            naming = self._nameless[0][0] + _NAMING_S
            due = naming if due is None else min(due, naming)
        if len(self._strangers) > CROWD:
            oldest = next(iter(self._strangers.values())).since + PATIENCE_S
            due = oldest if due is None else min(due, oldest)
        return due

    def tidy(self, now: float) -> None:
        """Show out the strangers that are too many, and say who was refused."""
        while len(self._strangers) > MOST:
            self._show_out(self._oldest_of_the_greatest_crowd())
        while len(self._strangers) > CROWD:
            fd, guest = next(iter(self._strangers.items()))
            if now - guest.since < PATIENCE_S:
                break
            self._show_out(fd)
        self._give_up_naming(now)
        self.refusals.flush(now)

    def hear(self) -> None:
        """Name those who were gone before they could be asked; all events have been taken."""
        gone = [] if self._obituaries is None else self._obituaries.read()
        if not self._nameless:
            return
        known = {guest.peer for guest in self._guests.values()}
        for host, port in gone:
            peer = f"{host}:{port}"
            if self._nameless and peer not in known and peer not in self._named_gone:
                since, reason = self._nameless.popleft()
                self.refusals.note(host, peer, reason, since)

    def close(self) -> None:
        """Say what has not been said yet."""
        self._give_up_naming(float("inf"))
        self.refusals.last_words()
        if self._obituaries is not None:
            self._obituaries.close()

    def _give_up_naming(self, now: float) -> None:
        while self._nameless and now >= self._nameless[0][0] + _NAMING_S:
            since, reason = self._nameless.popleft()
            self.refusals.note("", _UNKNOWN, reason, since)

    def _enter(self, fd: int, now: float) -> None:
        host, peer = _peer_of(fd, self._port)
        guest = _Guest(host, peer, now)
        self._guests[fd] = self._strangers[fd] = guest
        self._crowds[host] += 1
        _have_descriptors_for(len(self._guests))

    def _left(self, fd: int, now: float) -> bytes:
        guest = self._guests.pop(fd, None)
        reason, self._reason = self._reason, ""
        if guest is None:
            return b""
        if self._strangers.pop(fd, None) is not None:
            self._leave_crowd(guest)
        if guest.client:
            self._fds.pop(guest.client, None)
            self._named_gone.append(guest.peer)
            return guest.client
        if reason == _LEFT and now - guest.since >= 0.9 * HANDSHAKE_S:
            reason = _SLOW
        reason = guest.reason or reason or _FOREIGN
        if guest.host:
            self._named_gone.append(guest.peer)
            self.refusals.note(guest.host, guest.peer, reason, now)
        else:
            self._nameless.append((now, reason))
        return b""

    def _leave_crowd(self, guest: _Guest) -> None:
        self._crowds[guest.host] -= 1
        if not self._crowds[guest.host]:
            del self._crowds[guest.host]

    def _oldest_of_the_greatest_crowd(self) -> int:
        host = max(self._crowds, key=self._crowds.__getitem__)
        return next(fd for fd, guest in self._strangers.items() if guest.host == host)

    def _show_out(self, fd: int) -> None:
        """Shut a stranger's connection; ZeroMQ finds it closed, and says so."""
        guest = self._strangers.pop(fd)
        self._leave_crowd(guest)
        guest.reason = _CROWDED
        with contextlib.suppress(OSError), socket_behind(fd) as probe:
            if _is_at(probe, self._port) and _peer_name(probe)[1] == guest.peer:
                probe.shutdown(socket.SHUT_RDWR)


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


def _obituaries(port: int) -> Obituaries | None:
    if not port:
        return None
    try:
        return Obituaries(port)
    except OSError:
        return None


def _peer_of(fd: int, port: int) -> tuple[str, str]:
    """Return the address of a connection, without and with its port; empty if it is over."""
    with contextlib.suppress(OSError), socket_behind(fd) as probe:
        if _is_at(probe, port):
            return _peer_name(probe)
    return "", _UNKNOWN


def _peer_name(probe: socket.socket) -> tuple[str, str]:
    name = probe.getpeername()
    if isinstance(name, tuple):
        return str(name[0]), f"{name[0]}:{name[1]}"
    raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return f"user {user}", f"process {pid} of user {user}"


def _have_descriptors_for(connections: int) -> None:
    """Raise the soft limit of descriptors when connections take a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or connections * _FEW_DESCRIPTORS < soft:
        return
    most = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if most > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            _log.info("many connections: this process may have %d descriptors now", most)
