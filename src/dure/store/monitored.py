"""An authenticated ZeroMQ socket between two processes, with a monitor that reports its state.

The monitor reports whether the handshake succeeded, why it failed, and that the peer is gone, each
within a millisecond of the kernel knowing. A peer whose machine is gone is noticed by the kernel's
probes (`silence`). Peers authenticate each other with CURVE keys.

Threads:
    One at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import zmq

from dure.store.key import JobKey
from dure.store.router import read_event
from dure.store.silence import end_after_silence

__all__ = ["MonitoredSocket"]

_Context = zmq.Context[zmq.Socket[bytes]]
_numbers = itertools.count()


class MonitoredSocket:
    """A DEALER socket and its monitor.

    Args:
        context: ZeroMQ's.
        events: The events to report.
        longest_message: The longest message that may arrive, in bytes.
        between_hosts: Whether the connection breaks when the peer's host is silent (`silence`).

    Attributes:
        socket: The socket; its options may be changed until `connect` or `bind`.
        monitor: Readable when there is an event, and when ZeroMQ's context ends.
    """

    def __init__(
        self, context: _Context, events: int, longest_message: int, between_hosts: bool = True
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        try:
            self.monitor = context.socket(zmq.PAIR)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        with self.closed_on_error():
            self.socket.linger = 0
            self.socket.maxmsgsize = longest_message
            if between_hosts:
                end_after_silence(self.socket)
            watch = f"inproc://monitor-{next(_numbers)}"
            self.socket.monitor(watch, events)
            self.monitor.connect(watch)

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the socket if the block raises: an open one would keep the context from ending."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def use_key(self, key: JobKey | None, protocol: str) -> None:
        """Authenticate with keys derived from the job key; the peer is a `GuardedRouter`."""
        if key is not None:
            key.arm(self.socket, f"{protocol} client")
            self.socket.curve_serverkey = key.pair(f"{protocol} server").public

    def connect(self, endpoint: str) -> None:
        """Connect to `endpoint`, with the keys that the socket has."""
        self.socket.ipv6 = "[" in endpoint
        self.socket.connect(endpoint)

    def bind(self, endpoint: str, descriptor: int) -> None:
        """Accept connections at a listening socket, by the descriptor that ZeroMQ then owns."""
        self.socket.use_fd = descriptor
        self.socket.curve_server, self.socket.ipv6 = True, "[" in endpoint
        self.socket.bind(endpoint)

    def event(self, timeout_ms: int = 0) -> zmq.Event | None:
        """Return the next event; None if there is none within the time."""
        return zmq.Event(read_event(self.monitor)[0]) if self.monitor.poll(timeout_ms) else None

    def close(self, linger_ms: int = 0) -> None:
        """Close; for `linger_ms`, ZeroMQ still sends what was queued."""
        with contextlib.suppress(zmq.ContextTerminated):
            self.socket.disable_monitor()  # first: ZeroMQ waits for a monitor that is not read
        self.monitor.close(0)
        self.socket.close(linger_ms)
