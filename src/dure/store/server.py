"""The network store's server: one thread, which waits on sockets and asks the `Board` what to say.

The thread polls four things: the ROUTER socket with the requests; the ZAP socket, on which ZeroMQ
asks whether a client that has completed the CURVE handshake may come in (only the one public key
derived from the job key may); the monitor, which tells who connects, leaves or is refused; and a
pipe through which other threads wake it. All of ZeroMQ's own work, encryption included, is done by
its I/O thread. A stranger fails in the handshake, so not one byte of his is ever parsed here; how
many of them there may be is decided in `tracker`, and what they can make ZeroMQ hold is one frame
of 64 KiB each (see `wire`).

Owners. A process that opens the address of a server that it has already *adopts* this server, with
all its clients and keys: a process group, RPC and stores of the program meet at one port.

Ending. A server that is merely stopped would cut off ranks that still read their last keys. So each
owner *retires* it. After the last one has, it continues until its last client has left or the
linger time has passed. If it is adopted in the meantime, it is no longer retired, so ranks can
destroy and re-create their world at their own pace.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
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
from dure.store.tracker import close_inherited
from dure.store.wire import Reply, frames_of, join, pack, read_request
from dure.trace import logs

__all__ = ["StoreServer", "adopt", "adopt_or_make"]

_LINGER_S = 10.0
"""How long a retired server waits for its clients to leave, in the background."""

_EXIT_LINGER_S = 1.0
"""The same at the end of the process, which has to wait for it."""

_BURST = 64
"""Requests that are read before the other sockets are looked at again."""

_GUARDING = Guarding(what="store", waiting_requests=32, waiting_replies=16)
"""A client asks one thing at a time, so a member never has more than one reply."""

_LONGEST_POLL_S = 3600.0

_LEAVE_S = 1.0
"""How long a client that has been closed may take to be gone here."""

_LOOK_S = 1.0
"""How long the poll may take while there are leases, so that the server notices its own pauses."""

_log = logs.logger("store")


class StoreServer:
    """Holds the keys of a job and serves them until it is stopped.

    Args:
        listener: Where to listen.
        key: The job key; None lets everybody in.
        presence: Told of leased keys whose connection broke or came back (see `Board`), in the
            server's thread: it must return at once.
        board: What answers the requests; by default a `Board` without keys.

    Threads: `retire` and `stop` may be called from any thread.
    """

    def __init__(
        self,
        listener: Listener,
        key: JobKey | None,
        presence: Callable[[str, bool], None] | None = None,
        board: Board | None = None,
    ) -> None:
        self.endpoint, self.port, self.pid = listener.endpoint, listener.port, os.getpid()
        self._listen_fd = listener.fd
        self._board = board or Board(secrets.token_bytes(8), presence)
        self._clock = ListeningClock()
        self._ending = threading.Lock()  # between the thread's decision to end, and `adopt`
        self._num_owners = 1
        self._retired: tuple[float, float] | None = None  # when it may end, and when it must
        self._at_least_s = 0.0
        self._stopping = False
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._context = zmq.Context()
        try:
            self._open(listener, key)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise StoreError(
                f"the store cannot listen on {listener.endpoint}", seen=str(error)
            ) from None
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="dure-store-server", daemon=True)
        self._thread.start()

    @property
    def retired(self) -> bool:
        """Whether all its owners have left it, so that it ends soon."""
        return self._retired is not None

    def retire(self, at_least_s: float = 0.0, linger_s: float = _LINGER_S) -> None:
        """Let it end by itself, when the last client leaves or `linger_s` from now.

        Each owner calls this once; before the last one has, it does nothing.

        Args:
            at_least_s: How long to go on even without clients, for those who come late.
            linger_s: How long to go on for clients that stay.
        """
        with self._ending:
            self._num_owners -= 1
            if self._num_owners > 0:
                return
            now = time.monotonic()
            self._at_least_s = at_least_s
            self._retired = now + at_least_s, now + linger_s
            self._board.is_retired = True
        self._wake()

    def adopt(self) -> bool:
        """Become one of its owners; False, and it is gone, if it was ending already."""
        with self._ending:
            if not self._stopping:
                self._num_owners = 1 if self._retired else self._num_owners + 1
                self._retired, self._board.is_retired = None, False
                return True
        self._thread.join()
        return False

    def is_left_by_all(self, within_s: float) -> bool:
        """Wait until no client is connected; tell whether that was so within this time."""
        deadline = time.monotonic() + within_s
        while self._peers.strangers or self._peers.members:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def stop(self) -> None:
        """End now; returns when the thread, the sockets and the context are gone."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def finish(self) -> None:
        """Give clients a moment to leave, then stop; at the end of the process, for all owners."""
        self._num_owners = 1
        self.retire(self._at_least_s, _EXIT_LINGER_S)
        self._thread.join(_EXIT_LINGER_S + 1)
        self.stop()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, and closed the pipe
            self._waker.send(b"!")

    def _open(self, listener: Listener, key: JobKey | None) -> None:
        """Make the sockets; called before the thread starts, which then owns them."""
        self._guarded = GuardedRouter(self._context, listener, key, _GUARDING)
        self._router, self._peers = self._guarded.socket, self._guarded.peers

    def _close_sockets(self) -> None:
        self._context.destroy(linger=0)
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self._guarded.sources, self._wakened):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._ended():
                patience_ms = self._patience_ms()
                if patience_ms is None:
                    self._clock.turn()
                else:
                    self._clock.turn(patience_ms / 1000 + _LOOK_S)
                ready = dict(poller.poll(patience_ms))
                self._clock.turn(_LOOK_S)
                try:
                    self._serve(ready)
                except Exception:  # the job's meeting point outlives whatever one request does
                    _log.exception("the store's server goes on after an error")
        finally:
            self._stopping = True
            self._peers.tidy(float("inf"))
            self._guarded.close()
            listening = os.dup(self._listen_fd) if self._listen_fd >= 0 else -1
            self._close_sockets()
            if listening >= 0:
                stop_listening(listening)
            _servers.discard(self)  # last, so that whoever does not find it finds a free port

    @property
    def _ends_at(self) -> float | None:
        """When a retired server ends, as things stand."""
        retired = self._retired
        if retired is None:
            return None
        may, must = retired
        return must if self._peers.strangers or self._peers.members else min(may, must)

    def _ended(self) -> bool:
        with self._ending:
            ends_at = self._ends_at
            if ends_at is not None and time.monotonic() >= ends_at:
                self._stopping = True
            return self._stopping

    def _patience_ms(self) -> int | None:
        """Return how long the poll may take."""
        now = time.monotonic()
        waits = [due - now for due in (self._peers.due(), self._ends_at) if due is not None]
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
        self._peers.tidy(time.monotonic())

    def _answer_requests(self) -> None:
        for _ in range(_BURST):
            try:
                client = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._send(self._handle(client, self._read(client)))

    def _read(self, client: bytes) -> list[bytes]:
        """Read the frames of one request; the first one of a client says which connection it is."""
        first = self._guarded.receive(client)
        return [first, *(self._router.recv_multipart() if self._router.rcvmore else ())]

    def _handle(self, client: bytes, frames: list[bytes]) -> list[Answer]:
        try:
            return self._board.handle(client, read_request(join(frames)), self._clock.now())
        except (msgspec.DecodeError, DureError, ValueError, OverflowError) as error:
            return [(client, Reply("error", text=str(error)))]
        except Exception as error:  # never without an answer: a member would wait for it
            _log.exception("the store's server goes on after a request that it could not carry out")
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
                self._peers.refused(f"client {client.hex()}", "it does not read its answers")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # else it has left, and nobody misses the reply
                    raise

    def forget_inherited(self) -> None:
        """In a forked child: give up the sockets, which are the parent's.

        Otherwise the child would keep the port taken, and connections open, when the parent ends.
        """
        _inherited.append(self)
        if self._listen_fd >= 0:
            peers = (*self._peers.strangers, *self._peers.members)
            close_inherited([self._listen_fd, *peers], self.port)


_servers: set[StoreServer] = set()
"""The servers of this process that run, retired ones included."""

_making = threading.Lock()
"""Held from the look for a server until the new one is there."""

_inherited: list[StoreServer] = []
"""The parent's servers, in a forked child: kept so that nothing is ever torn down there."""


def adopt(endpoint: str, afresh: bool = False) -> StoreServer | None:
    """Return the server of this process at `endpoint`, with one more owner.

    Args:
        endpoint: Where it listens.
        afresh: Stop a retired server instead, so that its keys are gone; unless clients stay: one
            of them may be of a rank that has opened the address again already.
    """
    for server in list(_servers):
        if server.endpoint != endpoint:
            continue
        if afresh and server.retired and server.is_left_by_all(_LEAVE_S):
            server.stop()
        elif server.adopt():
            return server
    return None


def adopt_or_make(
    endpoint: str, make: Callable[[], StoreServer], afresh: bool = False
) -> StoreServer:
    """Return the server of this process at `endpoint`, with one more owner, or make one.

    Args:
        endpoint: Where it listens.
        make: Makes the server.
        afresh: As for `adopt`.

    Threads: of several that open one endpoint, one makes the server and the others adopt it.
    """
    with _making:
        return adopt(endpoint, afresh) or make()


def _forget_servers() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have held it
    for server in list(_servers):
        server.forget_inherited()
    _servers.clear()


def _finish_servers() -> None:
    for server in list(_servers):
        server.finish()


os.register_at_fork(after_in_child=_forget_servers)
at_process_end(_finish_servers, order=3)
