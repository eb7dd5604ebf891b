"""One connection of a client to the network store's server: opened once, never reopened.

ZeroMQ would reconnect by itself and deliver a pending request to the next process that listens. We
switch that off and watch the socket's monitor instead (`monitored`).
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable

import msgspec
import zmq

from dure.errors import StoreLost, StoreRefused, StoreTimeout
from dure.store.address import why_unreachable
from dure.store.builds import Build
from dure.store.key import JobKey
from dure.store.monitored import MonitoredSocket
from dure.store.wire import FRAME_LIMIT, StoreRequest, frames_of, pack, read_reply

__all__ = ["Connection", "connection_lost", "dial"]

_ATTEMPT_S = 5.0
"""How long one attempt to connect may take: five round trips of a slow network, and less than the
time after which a server whose thread is busy ends the handshake, which looks like a refusal."""

_FAST_MS = 20
"""A reply normally comes within this time, so the monitor is only looked at afterwards."""

_LONGEST_POLL_S = 3600.0
"""ZeroMQ counts milliseconds in 32 bits, which is less than the longest timeout."""

_REFUSALS = 4
"""How often we are refused before we believe it: a server that ends hangs up just as one with
another key does."""

_HELLO = pack(StoreRequest("check"))
"""The first request of every connection, so that the server soon knows its members. Its
answer has the server's build; every version sends both in the same shape."""


class _Outcome(enum.Enum):
    """How an attempt to connect ended."""

    OPEN = "the handshake succeeded"
    UNREACHABLE = "no process listens there"
    REFUSED = "refused: different job key (or DURE_INSECURE on one side only)"
    FOREIGN = "the peer does not speak as we do: DURE_INSECURE on one side only, or not our store"
    SILENT = "the peer accepted the connection and then sent nothing"


_OUTCOMES = {
    zmq.Event.HANDSHAKE_SUCCEEDED: _Outcome.OPEN,
    zmq.Event.HANDSHAKE_FAILED_AUTH: _Outcome.REFUSED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _Outcome.REFUSED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _Outcome.FOREIGN,
    zmq.Event.CLOSED: _Outcome.UNREACHABLE,
    zmq.Event.DISCONNECTED: _Outcome.UNREACHABLE,
}


class Connection:
    """A connection that may be open; `dial` makes those that are.

    Attributes:
        server_name: Identifies the server among others that may be at the same endpoint later.
        server_build: Its build of Dure, and its host.

    Threads:
        One at a time.
    """

    server_name = b""
    server_build = Build(), "its host"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key: JobKey | None):
        self._endpoint = endpoint
        self._link = MonitoredSocket(context, sum(_OUTCOMES), FRAME_LIMIT)
        self._socket = self._link.socket
        with self._link.closed_on_error():
            self._socket.reconnect_ivl = -1
            self._socket.rcvtimeo = _FAST_MS
            self._link.use_key(key, "store")
            self._link.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._link.monitor, zmq.POLLIN)

    def attempt(self, deadline: float) -> _Outcome:
        """Wait for the handshake, and say hello."""
        event = self._link.event(max(1, int((deadline - time.monotonic()) * 1000)))
        if event is None:
            return _Outcome.SILENT
        outcome = _OUTCOMES[event]
        if outcome is not _Outcome.OPEN:
            return outcome
        with contextlib.suppress(StoreLost, msgspec.DecodeError, UnicodeDecodeError):
            answer = self.call(_HELLO, deadline)
            if answer is not None:
                reply = read_reply(answer)
                self.server_name = b"".join(reply.values)
                if len(reply.names) >= 3 and reply.names[0].isdigit():
                    protocol, version, host = reply.names[:3]
                    self.server_build = Build(int(protocol), version), host
                return outcome
        return _Outcome.SILENT

    @property
    def broken(self) -> bool:
        """Whether the peer, or our context, has gone; asked before a connection is used again."""
        try:
            return self._link.monitor.poll(0) != 0
        except zmq.ContextTerminated:
            return True

    def call(self, message: bytes, deadline: float) -> bytes | None:
        """Send a request and return the reply; None if none came by `deadline`.

        Raises:
            StoreLost: The connection broke in the meantime.
        """
        try:
            # without NOBLOCK, a socket without a peer would wait forever
            self._socket.send_multipart(frames_of(message), zmq.NOBLOCK)
        except zmq.Again:
            raise connection_lost(self._endpoint) from None
        try:
            return b"".join(self._socket.recv_multipart())
        except zmq.Again:
            pass
        while True:
            left_s = deadline - time.monotonic()
            patience_ms = int(1000 * min(left_s, _LONGEST_POLL_S)) + 1 if left_s > 0 else 0
            ready = dict(self._poller.poll(patience_ms))
            if self._socket in ready:
                return b"".join(self._socket.recv_multipart())
            if self._link.monitor in ready:
                raise connection_lost(self._endpoint)
            if left_s <= 0:
                return None

    def close(self) -> None:
        """Close at once."""
        self._link.close()


def connection_lost(endpoint: str) -> StoreLost:
    """Make the error about a server that is gone."""
    return StoreLost(
        f"the connection to the store at {endpoint} broke",
        seen="the process that holds it (rank 0, or the launcher) ended or closed it",
        fix="Look at that process's own error first.",
    )


def dial(
    connect: Callable[[], Connection],
    endpoint: str,
    key: JobKey | None,
    timeout_s: float,
    absent_s: float | None = None,
) -> Connection:
    """Open a connection; keep trying while no process listens.

    Args:
        connect: Begins an attempt.
        endpoint: Where the server is.
        key: The job key; None talks in the clear.
        timeout_s: How long to try.
        absent_s: How long to keep trying while no process listens; None: as long as `timeout_s`.

    Raises:
        StoreTimeout: No process listened there in time, or the one that did sent nothing.
        StoreRefused: The server refused this process several times in a row.
    """
    start = time.monotonic()
    absent_s = timeout_s if absent_s is None else absent_s
    pause_s, outcome = 0.005, _Outcome.UNREACHABLE
    refusals: list[_Outcome] = []
    while (left_s := timeout_s - (time.monotonic() - start)) > 0:
        connection = connect()
        try:
            outcome = connection.attempt(min(start + timeout_s, time.monotonic() + _ATTEMPT_S))
        except BaseException:
            connection.close()
            raise
        if outcome is _Outcome.OPEN:
            return connection
        connection.close()
        if outcome in (_Outcome.REFUSED, _Outcome.FOREIGN):
            refusals.append(outcome)
        else:
            refusals.clear()
        if len(refusals) == _REFUSALS:
            raise _refused(endpoint, refusals, key)
        if outcome is _Outcome.UNREACHABLE and time.monotonic() - start >= absent_s:
            break
        time.sleep(min(pause_s, max(0.0, left_s)))
        pause_s = min(2 * pause_s, 0.1)
    raise StoreTimeout(
        f"the store at {endpoint} cannot be reached",
        elapsed_s=time.monotonic() - start,
        seen=why_unreachable(endpoint) or outcome.value,
        fix="Check that rank 0 (or the launcher) runs, that MASTER_ADDR and MASTER_PORT are its "
        "own, and that the address is not a loopback one on several hosts (DURE_STORE_BIND).",
    )


def _refused(endpoint: str, outcomes: list[_Outcome], key: JobKey | None) -> StoreRefused:
    mine = "no key" if key is None else f"the key with fingerprint {key.fingerprint}"
    # a peer that hangs up early has not always sent what it speaks
    foreign = _Outcome.FOREIGN in outcomes
    outcome = _Outcome.FOREIGN if foreign else _Outcome.REFUSED
    error = StoreRefused(
        f"the store at {endpoint} refused this process",
        seen=f"{outcome.value}; this process has {mine}",
        fix="All ranks need the same key: start them with `dure run`, or give them the same "
        "DURE_JOB_KEY_FILE, or the same ~/.config/dure/key and MASTER_ADDR:MASTER_PORT, letter "
        "for letter; or the port belongs to another program.",
    )
    error.foreign = foreign
    return error
