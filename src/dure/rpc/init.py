"""The beginning and the end of RPC in a process."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

from dure.errors import RpcError, UsageError
from dure.rpc import backend_registry
from dure.rpc.agent import UNSET, Agent
from dure.rpc.allow import Allowed
from dure.rpc.autograd.backward import attach
from dure.rpc.current import current, is_set, set_current
from dure.rpc.meeting import Meeting, connect
from dure.rpc.names import WorkerInfo
from dure.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from dure.rpc.profiling import follow_profiler
from dure.rpc.termination import all_gather, wait_all_workers, wait_for_own
from dure.store.base import Store
from dure.trace import signals
from dure.trace.flight import recording

__all__ = ["init_rpc", "shutdown"]

_log = logging.getLogger("dure.rpc")


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    allow: Iterable[object] | None = None,
    store: Store | None = None,
) -> None:
    """Let this process call others, and others call it.

    Args:
        name: Unique among those that are there; letters, digits, `_`, `-` and `:`, under 128.
        backend: A member of `BackendType`.
        rank: This process's id; -1: the environment's, or, where processes come and go, any.
        world_size: How many there are; -1: the environment's; None: processes come and go.
        rpc_backend_options: Threads, timeouts, where to meet (`TensorPipeRpcBackendOptions`).
        allow: Functions, classes and modules that others may call; None: everything.
        store: A store to meet in, in place of the options' `init_method`.

    Collective:
        With a world size all call, and wait for each other.

    Raises:
        RpcError: RPC is initialized already, or the name cannot be one.
        RendezvousError: The processes could not meet, or two have one name.
        UsageError: Something of `allow` cannot be allowed by name.
    """
    options = rpc_backend_options
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if options is not None and not isinstance(options, RpcBackendOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, "
            f"not {options!r}"
        )
    if is_set():
        raise RpcError("RPC is already initialized", fix="Call shutdown first.")
    if backend is not None and backend.value.init_backend_handler is not None:
        made = options or backend_registry.construct_rpc_backend_options(backend)
        set_current(backend_registry.init_backend(backend, store, name, rank, world_size, made))
        return
    if options is None:
        options = TensorPipeRpcBackendOptions()
    if not isinstance(options, TensorPipeRpcBackendOptions):
        if backend is None:
            raise TypeError(f"Could not infer backend for options {options!r}")
        text = "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
        raise TypeError(f"{text}, not {options!r}")
    WorkerInfo(name, 0)  # a bad name is told at once
    allowed = None if allow is None else Allowed(allow)
    meeting = Meeting(
        name=name,
        rank=rank,
        world_size=world_size,
        init_method=options.init_method,
        store=store,
        timeout=timedelta(seconds=options.rpc_timeout or 1800.0),
    )
    transport = connect(meeting, options.num_worker_threads)
    me = WorkerInfo(name, transport.peers.own_id)
    agent = Agent(me, transport, options.rpc_timeout, allowed, static=world_size is not None)
    agent.device_maps = options.device_maps
    attach(agent)
    follow_profiler()
    set_current(agent)
    agent.start()
    signals.install()


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End RPC in this process.

    Args:
        graceful: Wait until all workers have called this and no call is under way anywhere,
            nested ones too; who dies counts as done. Where processes come and go: until no call of
            this process is under way and none runs here.
        timeout: Seconds; 0 is none.

    Collective:
        With `graceful` and a world size all call, and wait for each other.

    Raises:
        RpcError: RPC has not been initialized, or the time is over; it has ended here all the same.
    """
    agent = current()
    if timeout < 0:
        raise UsageError("a timeout is 0 or more seconds", op="shutdown", seen=str(timeout))
    try:
        if graceful:
            (wait_all_workers if agent.static else wait_for_own)(agent, timeout)
            for held in agent.held():
                _log.info("at the end of RPC the program still holds %s", held)
    finally:
        set_current(None)
        agent.close()
        if not recording():
            signals.remove()


def _all_gather(  # pyright: ignore[reportUnusedFunction]
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET
) -> dict[str, Any]:
    """Return the objects of all workers, by their names."""
    agent = current()
    seconds = agent.timeout if timeout < 0 else timeout
    try:
        return all_gather(agent, obj, worker_names, timeout)
    except RpcError as error:
        if "RPC ran for more than" not in str(error):
            raise
        raise RpcError(f"timed out in _all_gather after {seconds:.2f} seconds: {error}") from None


def _barrier(worker_names: Collection[str]) -> None:  # pyright: ignore[reportUnusedFunction]
    """Wait for the workers named, which wait for each other."""
    all_gather(current(), None, worker_names)
