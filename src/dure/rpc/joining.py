"""How a process joins a world: it finds the store, and publishes how others reach it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from dure import env, native
from dure.comm.futures import starts_threads
from dure.errors import UsageError
from dure.rpc.peers import PeerAddress, Peers
from dure.rpc.sockets import Sockets
from dure.rpc.transport import HostTransport
from dure.store.address import outward_address, resolve
from dure.store.base import Store
from dure.store.builds import own_build
from dure.store.file import FileStore
from dure.store.identity import myself
from dure.store.init_method import FileEndpoint, read_init_method
from dure.store.key import KEY_BYTES, JobKey, mint
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.prefix import PrefixStore
from dure.store.rendezvous import rendezvous

__all__ = ["JoinOptions", "connect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The world that a process joins, and its place in it.

    Attributes:
        name: The process's name.
        rank: Its rank and id; if -1, that of the environment or the `init_method`, or with dynamic
            membership any.
        world_size: The number of processes; if -1, that of the environment or the `init_method`; if
            None, membership is dynamic.
        init_method: Where they meet, as in `init_process_group`.
        store: A store to meet in, instead.
        timeout: How long to wait for each other.
    """

    name: str
    rank: int = -1
    world_size: int | None = -1
    init_method: str | None = None
    store: Store | None = None
    timeout: timedelta = timedelta(seconds=60)


def connect(
    options: JoinOptions, slots: int, shared_memory: bool = True, unreachable_s: float | None = None
) -> HostTransport:
    """Join, and return the transport, not started yet.

    Args:
        options: The world, and this process's place in it.
        slots: How many calls run at a time.
        shared_memory: If False, all messages go through sockets.
        unreachable_s: How long to try to reach a process of another host until it counts as gone;
            if None, as long as a host may be silent.

    Raises:
        UsageError: The native engine is not supported here, or `threading` was patched.
        RendezvousError: The processes could not meet, or two have the same name.
        StoreError: No socket can be opened.

    Collective:
        In a fixed world all call, and wait for each other.
    """
    native.require("dure.rpc")
    if not starts_threads():
        raise UsageError(
            "RPC needs system threads to receive messages",
            op="init_rpc",
            seen="threading was patched, by gevent or eventlet",
            fix="Use RPC in processes that are not patched.",
        )
    store, rank, world_size, address, leave = _find_store(options)
    try:
        if store.compare_set("world", "", name := uuid.uuid4().hex) != name.encode():
            name = store.get("world").decode()
        here = address or outward_address(store, "TP_SOCKET_IFNAME")
        listener = listen(resolve(here, 0, "this host's address"))
        sockets = Sockets(listener, _key_of(store), name, unreachable_s)
        inbox = native.Inbox()
        heap, process = native.heap_identity(), myself()
        where = inbox.offset, listener.endpoint
        me = PeerAddress(options.name, rank, process, heap, *where, own_build())
        peers: Peers | None = None
        try:
            peers = Peers.meet(store, me, world_size) if world_size else Peers.join(store, me)
            return HostTransport(inbox, peers, sockets, slots, shared_memory, leave)
        except BaseException:
            if peers is not None:
                peers.close()
            sockets.close()
            raise
    except BaseException:
        leave()
        raise


def _find_store(options: JoinOptions) -> tuple[Store, int, int, str, Callable[[], None]]:
    """Return the store, this process's rank, the world size (0 for any), its address, and `leave`.

    The address is empty if other processes may be on other hosts.
    """
    rank, size, given = options.rank, options.world_size, options.store
    if size is not None:
        world = rendezvous(
            options.init_method, rank, size, given, options.timeout, group_name="rpc"
        )
        address = "127.0.0.1" if world.same_host else ""
        return world.store, world.rank, world.world_size, address, world.close
    if given is not None:
        return PrefixStore("dure/rpc", given), rank, 0, "", lambda: None
    url = options.init_method or "env://"
    # a process without a rank does not serve the store
    method = read_init_method(url, rank if rank >= 0 or url.startswith("env:") else 1, 1)
    if isinstance(method.endpoint, FileEndpoint):  # its other users may have died
        base = FileStore(method.endpoint.path, 1, options.timeout)
    else:
        base = method.endpoint.open(method.rank, 1, options.timeout.total_seconds())
    name, elastic = method.endpoint.name, env.flag("DURE_ELASTIC")
    if url.startswith("env:") and elastic:  # replacements have another restart count
        name = env.text("TORCHELASTIC_RUN_ID") or name
    return PrefixStore(f"dure/{name}/rpc", base), rank, 0, "", base.close


def _key_of(store: Store) -> JobKey | None:
    """Return the job key of the network store at the bottom of `store`.

    Other stores are as private as their file or server: their first process makes a key.
    """
    base = store
    while (inner := getattr(base, "underlying_store", None)) is not None:
        base = inner
    if isinstance(base, NetworkStore):
        return base.key
    key = mint()
    there = store.compare_set("key", "", key.raw)
    return JobKey(there[:KEY_BYTES])
