"""The network store's server: one thread that waits on sockets and asks the `Board` for replies.

The thread polls four things: the ROUTER socket with the requests, the ZAP socket and the monitor
(see `router`), and a pipe through which other threads wake it. All of ZeroMQ's own work, encryption
included, is done by its I/O thread.

A process has at most one server per endpoint. Each store of the process that serves there *holds*
it: a process group, RPC and stores of the program share one port. The server ends when no store
holds it any more and no client is connected, so ranks that still read their last keys are served,
and ranks can destroy and re-create their world at their own pace. At the end of the process,
clients have `_EXIT_S` to leave.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable

import msgspec
import zmq

from dure.errors import DureError, StoreError
from dure.store.board import Answer, Board
from dure.store.key import JobKey
from dure.store.lifetime import at_process_end
from dure.store.listener import Listener, stop_listening
from dure.store.router import GuardedRouter, Guarding
from dure.store.silence import ListeningClock
from dure.store.wire import Reply, frames_of, join, pack, read_request
from dure.trace import logs

__all__ = ["StoreServer", "shared_server"]

_EXIT_S = 1.0
"""How long the end of the process waits for clients to leave."""

_LEAVE_S = 1.0
"""How long the next store with keys of its own waits for the clients of the last one to leave."""

_BURST = 64
"""Requests that are read before the other sockets are looked at again."""

_GUARDING = Guarding(what="store", waiting_requests=32, waiting_replies=16)
"""A client asks one thing at a time, so a member never has more than one reply."""

_LONGEST_POLL_S = 3600.0

_LOOK_S = 1.0
"""How long the poll may take while there are leases, so that the server notices its own pauses."""

_log = logs.logger("store")


class StoreServer:
    """Holds the keys of a job and serves them; its maker holds it.

    Args:
        listener: Where to listen.
        key: The job key; None admits every client.
        board: Answers the requests; by default a `Board` without keys.

    Attributes:
        masters: Numbers of the stores here that wait for workers, for `TCPStore`.

    Threads:
        `hold`, `release` and `stop` may be called from any thread.
    """

    def __init__(
        self,
        listener: Listener,
        key: JobKey | None,
        board: Board | None = None,
    ) -> None:
        self.endpoint, self.port, self.pid = listener.endpoint, listener.port, os.getpid()
        self._listen_fd = listener.fd
        self._board = board or Board(secrets.token_bytes(8))
        self._clock = ListeningClock()
        self._num_holders = 1
        self.masters = itertools.count(1)
        self._lock = threading.Lock()  # between the thread's decision to end, and `hold`
        self._stopping = False
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._context = zmq.Context()
        try:
            self._guarded = GuardedRouter(self._context, listener, key, _GUARDING)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise StoreError(
                f"the store cannot listen on {listener.endpoint}", seen=str(error)
            ) from None
        self._router = self._guarded.socket
        _servers[self.endpoint] = self
        self._thread = threading.Thread(target=self._run, name="dure-store-server", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether a store of this process needs it; otherwise it ends when no client is left."""
        return self._num_holders > 0

    def hold(self) -> bool:
        """Add a holder. Return False if the server was already stopping, after it has ended."""
        with self._lock:
            if not self._stopping:
                self._num_holders += 1
                return True
        self._thread.join()
        return False

    def release(self) -> None:
        """Let it end when its last client has left, unless another store holds it."""
        with self._lock:
            self._num_holders -= 1
        self._wake()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, at most for `timeout_s`."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End now; returns when the thread, the sockets and the context are gone."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, and closed the pipe
            self._waker.send(b"!")

    def _close_sockets(self) -> None:
        self._context.destroy(linger=0)
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self._guarded.sources, self._wakened):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._has_ended():
                patience_ms = self._patience_ms()
                if patience_ms is None:
                    self._clock.turn()
                else:
                    self._clock.turn(patience_ms / 1000 + _LOOK_S)
                ready = dict(poller.poll(patience_ms))
                self._clock.turn(_LOOK_S)
                try:
                    self._serve(ready)
                except Exception:  # the job's meeting point outlives any failed request
                    _log.exception("the store's server continues after an error")
        finally:
            self._stopping = True
            self._guarded.close()
            listening = os.dup(self._listen_fd) if self._listen_fd >= 0 else -1
            self._close_sockets()
            if listening >= 0:
                stop_listening(listening)
            if _servers.get(self.endpoint) is self:  # last: a thread that misses it binds the port
                del _servers[self.endpoint]

    def _has_ended(self) -> bool:
        with self._lock:
            if not self.is_held and not self._guarded.members:
                self._stopping = True
            return self._stopping

    def _patience_ms(self) -> int | None:
        """Return how long the poll may take."""
        waits: list[float] = []
        if (due := self._board.next_deadline()) is not None:
            waits.append(due - self._clock.now())
        if self._board.has_leases:
            waits.append(_LOOK_S)
        if not waits:
            return None
        return int(max(0.0, min(*waits, _LONGEST_POLL_S)) * 1000) + 1

    def _serve(self, ready: dict[object, int]) -> None:
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        for gone in self._guarded.serve(ready):
            self._board.leave(gone)
        if self._router in ready:
            self._answer_requests()
        self._send(self._board.expire(self._clock.now()))

    def _answer_requests(self) -> None:
        for _ in range(_BURST):
            try:
                client = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._send(self._handle(client, self._read(client)))

    def _read(self, client: bytes) -> list[bytes]:
        """Read the frames of one request; the first one of a client identifies its connection."""
        first = self._guarded.receive(client)
        return [first, *(self._router.recv_multipart() if self._router.rcvmore else ())]

    def _handle(self, client: bytes, frames: list[bytes]) -> list[Answer]:
        try:
            return self._board.handle(client, read_request(join(frames)), self._clock.now())
        except (msgspec.DecodeError, DureError, ValueError, OverflowError) as error:
            return [(client, Reply("error", text=str(error)))]
        except Exception as error:  # never without a reply: a member would wait for it
            _log.exception("the store's server continues after a request that failed")
            return [(client, Reply("error", text=f"{type(error).__name__}: {error}"))]

    def _send(self, answers: list[Answer]) -> None:
        for client, reply in answers:
            message = (client, *frames_of(pack(reply)))
            try:
                try:
                    self._router.send_multipart(message, zmq.NOBLOCK)
                except zmq.Again:  # ZeroMQ looks only now and then what was read; make it look
                    self._router.get(zmq.EVENTS)
                    self._router.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                self._guarded.refusals.add(f"client {client.hex()}", "it does not read its answers")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # else it has left, and needs no reply
                    raise


_servers: dict[str, StoreServer] = {}
"""The servers of this process that run, by endpoint."""

_opening = threading.Lock()
"""Held from the search for a server until a new one has started."""

_inherited: list[StoreServer] = []
"""The parent's servers, in a forked child: kept so that nothing is torn down there."""


def shared_server(
    endpoint: str, make: Callable[[], StoreServer], own_keys: bool = False
) -> StoreServer:
    """Return the server of this process at an endpoint, held once more, or make one.

    Args:
        endpoint: Where it listens.
        make: Makes the server.
        own_keys: Whether the caller expects no keys of a store that was closed. Those are gone
            unless clients of that store stay: one of them may be of a rank that has opened the
            address again already.

    Threads:
        Of several that open one endpoint, one makes the server and the others hold it.
    """
    with _opening:
        server = _servers.get(endpoint)
        if server is not None and own_keys and not server.is_held:
            server.wait(_LEAVE_S)
        return server if server is not None and server.hold() else make()


def _forget_servers() -> None:
    global _opening
    _opening = threading.Lock()  # another thread of the parent may have held it
    _inherited.extend(_servers.values())
    _servers.clear()


def _stop_servers() -> None:
    for server in list(_servers.values()):
        while server.is_held:
            server.release()
        server.wait(_EXIT_S)
        server.stop()


os.register_at_fork(after_in_child=_forget_servers)
at_process_end(_stop_servers, order=3)
