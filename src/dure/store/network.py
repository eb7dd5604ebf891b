"""The network store: clients, and the server in the process of the one that is master.

A store keeps a small pool of connections: a call takes one that is idle, or opens another, and
gives it back afterwards. So threads never wait for each other, a thread parked in `get` included,
and a connection carries one request at a time. A connection that breaks is thrown away, and what
was asked through it is asked again through another one: a write carries a name, and the server
executes requests with the same name once. `StoreLost` means that no server, or another one, is at
the endpoint now.

After a fork the child drops the parent's connections, untouched, and opens its own at its first
call; a server stays the parent's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import msgspec
import zmq

from dure import env
from dure.errors import StoreError, StoreLost, StoreTimeout
from dure.store.address import LOOPBACK, Address, is_refused, resolve, resolve_shared
from dure.store.arguments import duration_of, integer_of, text_of
from dure.store.asking import AskingStore
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.builds import SAME_BUILD, own_build
from dure.store.connection import Connection, connection_lost, dial
from dure.store.identity import host_name
from dure.store.key import JobKey, load_for, name_of
from dure.store.listener import listen
from dure.store.server import StoreServer, shared_server
from dure.store.silence import silence_s
from dure.store.wire import Reply, StoreRequest, pack, read_reply
from dure.trace import logs

__all__ = ["NetworkStore", "TCPStore"]

_GRACE_S = 1.0
"""How much longer than the server's own deadline a client waits for its verdict."""

_REDIAL_S = 2.0
"""How long a client whose server was there once looks for it again."""

_WORKERS = "dure/workers"
"""Counts the workers that a master waits for; as in torch, `num_keys` counts this key."""

_log = logs.logger("store")


class NetworkStore(AskingStore):
    """A client of the store at a ZeroMQ endpoint, which may hold the server.

    Args:
        endpoint: Where the server is, such as ``tcp://10.0.0.1:29500``.
        key: The job key; None talks in the clear.
        timeout: How long `get`, `wait` and the first connection wait.
        server: The server, if this store holds it: `close` releases it.
        patience_s: Do not wait for a server: one that does not listen counts as gone at once, one
            that is silent after so long. None: look for the server until `timeout`.

    Raises:
        StoreTimeout: No process listens at the endpoint.
        StoreRefused: The server has another key.
    """

    def __init__(
        self,
        endpoint: str,
        key: JobKey | None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        server: StoreServer | None = None,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(timeout)
        self._endpoint, self._key, self._server = endpoint, key, server
        self._closed = self._replaced = False
        self.start_afresh()
        limits = (self._timeout.total_seconds(), None) if patience_s is None else (patience_s, 0.0)
        try:
            self._put_back(self._first(*limits))
        except BaseException:
            self.close()
            raise
        _stores.add(self)

    @property
    def endpoint(self) -> str:
        """Where the server is, in ZeroMQ's words."""
        return self._endpoint

    @property
    def key(self) -> JobKey | None:
        """The job key; None: it talks in the clear."""
        return self._key

    @property
    def serves(self) -> bool:
        """Whether this store holds a server of this process."""
        return self._server is not None

    def server_has_ended(self) -> bool:
        """Return whether the server is known to have ended; False means unknown.

        It is known where another server has answered at its endpoint, or where the host lives and
        no process listens there.
        """
        return self._replaced or is_refused(self._endpoint)

    def clone(self) -> NetworkStore:
        return NetworkStore(self._endpoint, self._key, self._timeout, self._server_for_clone())

    def _server_for_clone(self) -> StoreServer | None:
        """Return the server that this store holds, held once more."""
        server = self._server
        holds = server is not None and server.pid == os.getpid() and server.hold()
        return server if holds else None

    def close(self) -> None:
        """Close the connections; a server that this store holds serves until no client is left.

        Calls of other threads that wait in this store end with `StoreError`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._context.term()  # wakes the threads that use a connection, which close it
        if self._server is not None and self._server.pid == os.getpid():
            self._server.release()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def start_afresh(self) -> None:
        """Begin without connections: at first, and in a forked child, whose parent's they are."""
        if hasattr(self, "_context"):
            _inherited.append((self._context, self._idle))
        self._server_name = b""
        self._other_build = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _begin(self) -> Connection:
        """Begin to connect, unless `close` has begun, which frees the context that pyzmq uses."""
        with self._lock:
            self._check_open()
            return Connection(self._context, self._endpoint, self._key)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store at {self._endpoint} was closed by this process")

    def _first(self, timeout_s: float, absent_s: float | None = None) -> Connection:
        """Open the first connection, and remember which server it leads to."""
        connection = dial(self._begin, self._endpoint, self._key, timeout_s, absent_s)
        self._server_name = connection.server_name
        mine, (theirs, host) = own_build(), connection.server_build
        if theirs != mine:
            self._other_build = f"{theirs} on {host}, and this process has {mine} on {host_name()}"
        return connection

    def _take(self, timeout_s: float) -> Connection:
        """Return a working connection, which is this thread's until `_put_back`."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                connection = self._idle.pop()
            if not connection.broken:
                return connection
            connection.close()
        if not self._server_name:
            return self._first(timeout_s)
        try:
            # Not the caller's patience, which may be short: a busy server is not a lost one, nor is
            # one whose machine is paused. If no process listens there, that is known at once.
            here = self._endpoint.startswith((*LOOPBACK, "ipc://"))
            redial_s = 0.0 if here else _REDIAL_S
            connection = dial(self._begin, self._endpoint, self._key, silence_s(), redial_s)
        except StoreTimeout:
            raise connection_lost(self._endpoint) from None
        if connection.server_name != self._server_name:  # another one, which has not our keys
            connection.close()
            self._replaced = True
            raise connection_lost(self._endpoint)
        return connection

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    @property
    def _named(self) -> str:
        build = f", which is of another build of Dure ({self._other_build})"
        return f"the store at {self._endpoint}{build if self._other_build else ''}"

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        try:
            frame = pack(request)
        except OverflowError as error:
            raise StoreError(
                "a number is too large for the store", op=request.op, seen=str(error)
            ) from None
        deadline = time.monotonic() + patience_s + _GRACE_S
        try:
            while True:
                connection = self._take(patience_s)
                complete = False
                try:
                    answer = connection.call(frame, deadline)
                    complete = answer is not None
                    return read_reply(answer) if answer is not None else None
                except StoreLost:  # the next connection shows whether the server is lost
                    if time.monotonic() >= deadline:
                        raise
                finally:
                    if complete:
                        self._put_back(connection)
                    else:  # its reply may still come, and would be taken for the next one's
                        connection.close()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"the answer of {self._named} cannot be read", seen=str(error), fix=SAME_BUILD
            ) from None
        except zmq.ContextTerminated:
            raise StoreError(f"the store at {self._endpoint} was closed in the meantime") from None
        except zmq.ZMQError as error:
            raise StoreError(
                f"no connection to the store at {self._endpoint} can be made", seen=str(error)
            ) from None


class TCPStore(NetworkStore):
    """A store that one process serves over TCP; all arguments except `key` are torch's.

    Args:
        host_name: Name or address of the master's host. The master listens on this address alone,
            unless `DURE_STORE_BIND` names another (for 0.0.0.0, all of them, see
            `dure.store.address`).
        port: The port; 0 lets the master pick a free one (see `port`).
        world_size: How many stores, the master's included, will connect; None: any number.
        is_master: Whether this process runs the server. If it runs one at this address already, for
            another store, a process group or RPC, that one is used, and it holds their keys too.
        timeout: How long `get`, `wait` and connecting wait.
        wait_for_workers: Whether the master waits until `world_size` stores are connected.
        multi_tenant: Accepted: a process's server at an address is always shared.
        key: The job key; None finds it as `dure.store.key` says, or, with `DURE_INSECURE=1`,
            talks in the clear to every client.

    Raises:
        StoreError: The port is taken, the name is unknown, or there is no job key.
        StoreTimeout: The master cannot be reached.
        StoreRefused: The master has another job key.

    Threads:
        Any number may use one store. A forked child may use it too.

    Cost:
        One round trip each call, about 80 us on one host; the server never polls.

    Example:
        ```python
        import secrets
        from dure.store import JobKey

        keys = [secrets.token_bytes(32), 0]  # `dure run` gives the ranks a key, and a port
        dist.broadcast_object_list(keys, src=0)
        rank, key = dist.get_rank(), JobKey(keys[0])
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, key=key) if rank == 0 else None
        port = [server.port if server else 0]
        dist.broadcast_object_list(port, src=0)
        store = server or dist.TCPStore("127.0.0.1", port[0], key=key)
        store.set(f"ready{rank}", "yes")
        store.wait(["ready0", "ready1"])
        dist.barrier()
        store.close()
        ```
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        key: JobKey | None = None,
    ) -> None:
        host_name = text_of(host_name, "TCPStore", "host_name")
        port = integer_of(port, "TCPStore", "port")
        if world_size is not None:
            world_size = integer_of(world_size, "TCPStore", "world_size")
        timeout = duration_of(timeout, "TCPStore")
        address, server = resolve_shared(host_name, port), None

        def key_at(port: int) -> JobKey | None:
            return key or job_key(host_name, name_of(host_name, port))

        if is_master:
            server = serve(address, key_at, own_keys=True)
            address = replace(address, port=server.port)
        self._host, self._port = host_name, address.port
        super().__init__(address.endpoint, key_at(address.port), timeout, server)
        if world_size and world_size > 0 and wait_for_workers:
            try:
                self._await_workers(world_size)
            except BaseException:
                self.close()
                raise

    @property
    def host(self) -> str:
        """The master's host, as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The master's port."""
        return self._port

    def clone(self) -> TCPStore:
        made = TCPStore.__new__(TCPStore)
        NetworkStore.__init__(
            made, self._endpoint, self._key, self._timeout, self._server_for_clone()
        )
        made._host, made._port = self._host, self._port
        return made

    def list_keys(self) -> list[str]:
        return [key for key in super().list_keys() if key != _WORKERS]

    def _await_workers(self, world_size: int) -> None:
        # A server may serve several stores in turn, and a rank may open its next store before the
        # master has opened this one: so the master's nth waits for n times `world_size` stores.
        came = self.add(_WORKERS, 1)
        if came % world_size == 0:
            self.set(f"{_WORKERS}/{came // world_size}", b"")
        if self._server is not None:
            complete = f"{_WORKERS}/{next(self._server.masters)}"
            self.wait([complete])
            self.delete_key(complete)


def serve(
    address: Address, key_at: Callable[[int], JobKey | None], own_keys: bool = False
) -> StoreServer:
    """Return the server of this process at an address, or at DURE_STORE_BIND.

    Args:
        address: Where clients reach it; port 0 picks a port.
        key_at: Finds the key for the port.
        own_keys: As for `shared_server`.
    """
    bind = env.text("DURE_STORE_BIND")
    at = resolve(bind, address.port, "DURE_STORE_BIND") if bind else address

    def make() -> StoreServer:
        listener = listen(at)
        try:
            key = key_at(listener.port)
        except BaseException:
            os.close(listener.fd)
            raise
        return StoreServer(listener, key)

    return shared_server(at.endpoint, make, own_keys)


def job_key(host: str, job: str, wait_s: float = 0.0) -> JobKey | None:
    """Return the key for a store on `host`; None, with a loud warning, if DURE_INSECURE is set.

    The user's own is derived for the job of that name. A key that the store's host may be making
    just now is waited for `wait_s`.
    """
    if not env.flag("DURE_INSECURE"):
        return load_for(host, wait_s, job)
    _log.warning(
        "DURE_INSECURE is set: the store on %s has no key and no encryption; "
        "every process that reaches its port can read and change this job",
        host,
    )
    return None


_stores: weakref.WeakSet[NetworkStore] = weakref.WeakSet()
_inherited: list[object] = []
"""In a forked child: the parent's ZeroMQ objects, kept so that nothing is torn down twice."""


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
