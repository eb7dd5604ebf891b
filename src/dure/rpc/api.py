"""The public functions of RPC: start and end, calls, references and workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dure import torch_private
from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc import backend_registry, profiling
from dure.rpc.agent import RpcAgent
from dure.rpc.allow import Allowed
from dure.rpc.backend_registry import RpcBackendOptions, TensorPipeRpcBackendOptions
from dure.rpc.caller import UNSET, To
from dure.rpc.checks import check, check_seconds
from dure.rpc.current import current, is_set, set_current
from dure.rpc.joining import JoinOptions, connect
from dure.rpc.names import WorkerInfo
from dure.rpc.payloads import Args, Kwargs
from dure.rpc.peers import MOST_IDS
from dure.rpc.rref import RRef
from dure.rpc.termination import all_gather, wait_all_workers, wait_for_own
from dure.store.base import Store
from dure.torch_names import lazy_names
from dure.trace import logs, signals
from dure.trace.flight import recording

__all__ = [
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)

T = TypeVar("T")
Function = Callable[..., torch.futures.Future[T] | T]
"""A function that returns a T, or a future of a T (`functions.async_execution`)."""

_log = logs.logger("rpc")

_profiler_runs = torch_private.profiler_enabled

_here = threading.local()
"""`futures`: the futures that `_wait_all` waits for."""


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
    """Join a world of RPC: this process can call others, and others can call it.

    Args:
        name: A name that no other running worker has: fewer than 128 letters, digits, `_`, `-` and
            `:`.
        backend: A member of `BackendType`; if None, the one of the options.
        rank: This process's id, below 65,536. If -1, that of the environment (RANK), or with
            dynamic membership any.
        world_size: The number of processes. If -1, that of the environment (WORLD_SIZE). If None,
            membership is dynamic: processes join and leave at any time.
        rpc_backend_options: Threads, timeouts and where the processes meet
            (`TensorPipeRpcBackendOptions`).
        allow: Functions, classes and modules that others may call; if None, all. With a list,
            messages contain only plain values, tensors, references and these functions.
        store: A store to meet in, instead of the options' `init_method`.

    Collective:
        With a world size all processes call, and wait for each other.

    Raises:
        RpcError: RPC is initialized already, or the name is invalid.
        RendezvousError: The processes could not meet, or two have the same name.
        UsageError: An argument has the wrong type, the rank is too large, or something in `allow`
            cannot be found by its name.
        TypeError: `backend` or the options have the wrong type.

    Cost:
        A few messages to the store per process. Four Python threads: two that
        receive, one for sockets and one for timers; with several hosts or dynamic membership, one
        more.

    Example:
        ```python
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        ```
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
        set_current(backend.value.init_backend_handler(store, name, rank, world_size, made))
        return
    if options is None:
        options = TensorPipeRpcBackendOptions()
    if not isinstance(options, TensorPipeRpcBackendOptions):
        if backend is None:
            raise TypeError(f"Could not infer backend for options {options!r}")
        text = "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
        raise TypeError(f"{text}, not {options!r}")
    _check_place(name, rank, world_size, store)
    joining = JoinOptions(
        name=name,
        rank=rank,
        world_size=world_size,
        init_method=options.init_method,
        store=store,
        timeout=timedelta(seconds=min(options.rpc_timeout or 1800.0, 86_400.0)),
    )
    _join(joining, options, None if allow is None else Allowed(allow))


def _join(
    joining: JoinOptions, options: TensorPipeRpcBackendOptions, allowed: Allowed | None
) -> None:
    """Join, and start this process's agent."""
    static = joining.world_size is not None
    with ExitStack() as opened:
        transport = connect(joining, options.num_worker_threads)
        opened.callback(transport.close)
        me = WorkerInfo(joining.name, transport.peers.own_id)
        agent = RpcAgent(me, transport, options.rpc_timeout, allowed, static)
        opened.callback(agent.close)
        agent.device_maps = options.device_maps
        profiling.follow_profiler()
        set_current(agent)
        opened.callback(set_current, None)
        agent.start()
        signals.install()
        opened.pop_all()
    _report(agent, options)


@logs.never_fails
def _report(agent: RpcAgent, options: TensorPipeRpcBackendOptions) -> None:
    """Log the world of RPC that this process has joined."""
    first = min(worker.id for worker in agent.workers)
    count = len(agent.workers)
    workers = f"{count} worker{'s' if count > 1 else ''}" if agent.static else "dynamic membership"
    logs.decided(
        _log,
        agent.me.id - first,
        "RPC with %s: this is %r (id %d); %d threads for calls; timeout %g s",
        *(workers, agent.me.name, agent.me.id, options.num_worker_threads, options.rpc_timeout),
    )


def _check_place(name: object, rank: object, world_size: object, store: object) -> None:
    """Check arguments of `init_rpc`.

    Raises:
        UsageError: One has the wrong type, or the rank is too large.
        RpcError: The name is invalid.
    """
    op, fix = "init_rpc", "Omit it, or pass -1 for the value of the environment."
    check(name, str, "name must be a string", op=op, fix="Give each worker another name.")
    check(rank, int, "rank must be an int", op=op, fix=fix)
    check(world_size, int | None, "world_size must be an int or None", op=op, fix=fix)
    check(store, Store | None, "store must be a Store", op=op, fix="Pass one of `dure.store`.")
    assert isinstance(name, str)
    assert isinstance(rank, int)
    WorkerInfo(name, 0)
    if rank >= MOST_IDS:
        most = f"Ranks are below {MOST_IDS:,}; with dynamic membership, omit it for any."
        raise UsageError("the rank is too large", op=op, seen=str(rank), fix=most)


def _all_gather(  # pyright: ignore[reportUnusedFunction]
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET
) -> dict[str, Any]:
    """Return the objects of all workers, by the workers' names."""
    agent = current()
    seconds = agent.timeout if timeout < 0 else timeout
    try:
        return all_gather(agent, obj, worker_names, timeout) or {}
    except RpcError as error:
        if "RPC ran for more than" not in str(error):
            raise
        raise RpcError(f"timed out in _all_gather after {seconds:.2f} seconds: {error}") from None


def _barrier(worker_names: Collection[str]) -> None:  # pyright: ignore[reportUnusedFunction]
    """Wait until all named workers have called this; this worker is one of them."""
    all_gather(current(), None, worker_names, returns_values=False)


def is_available() -> bool:
    """Whether RPC is available: always True.

    Returns:
        True. If the native engine is not supported on this system, `init_rpc` raises `UsageError`.

    Example:
        ```python
        assert rpc.is_available()
        ```
    """
    return True


def rpc_sync(
    to: To, func: Function[T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET
) -> T:
    """Call a function in another process, or in this one, and wait for its result.

    The function is sent by its name. Arguments and results are copied; tensors that share memory
    share it in the other process, too. The function runs at most once.

    Args:
        to: The callee: a name, an id or a `WorkerInfo`.
        func: A function that the callee can import under the same name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds; -1 for the default, 0 for none. After the timeout the function is not
            stopped.

    Returns:
        The result of the function.

    Raises:
        Exception: Raised by the function: the same type, with the remote traceback in its text.
        PeerLost: The callee is gone; the function may have run.
        RpcError: The call timed out; something cannot be sent; there is no such worker; the callee
            does not allow the function.
        UsageError: An argument has the wrong type.

    Cost:
        One message to the callee and one back.

    Threads:
        Any; the calling thread receives messages while it waits.

    Example:
        ```python
        total = rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), 3))
        assert total.tolist() == [4.0, 4.0]
        ```
    """
    if _profiler_runs():
        return profiling.call(current(), "sync", to, func, args, kwargs, timeout)
    return current().rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To, func: Function[T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET
) -> torch.futures.Future[T]:
    """Start to call a function in another process, and return a future of its result.

    The arguments may be changed when this returns. It does not wait for the callee, so a program
    that starts many calls with large arguments should wait for some before it starts more.

    Args:
        to: The callee: a name, an id or a `WorkerInfo`.
        func: A function that the callee can import under the same name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds; -1 for the default, 0 for none. After the timeout the function is not
            stopped.

    Returns:
        A future. Its `wait` returns the function's result, or raises the errors of `rpc_sync` that
        occur after this returns, and `PeerLost` if the callee is gone.

    Raises:
        RpcError: Something cannot be sent, or there is no such worker.
        UsageError: An argument has the wrong type.

    Cost:
        One message to the callee and one back.

    Example:
        ```python
        futures = [rpc.rpc_async(f"worker{1 - rank}", max, (n, 1)) for n in range(3)]
        assert [future.wait() for future in futures] == [1, 1, 2]
        ```
    """
    future: torch.futures.Future[T]
    try:
        if _profiler_runs():
            future = profiling.call(current(), "async", to, func, args, kwargs, timeout)
        else:
            future = current().rpc_async(to, func, args, kwargs, timeout)
    except PeerLost as error:
        future = torch.futures.Future()
        future.set_exception(error)  # pyright: ignore[reportArgumentType]
    if hasattr(_here, "futures"):
        _here.futures.append(future)
    return future


def remote(
    to: To, func: Function[T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET
) -> RRef[T]:
    """Start to call a function in another process, which keeps the result and owns it.

    Args:
        to: The callee: a name, an id or a `WorkerInfo`.
        func: A function that the callee can import under the same name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds; -1 for the default, 0 for none. After the timeout the function is not
            stopped.

    Returns:
        A reference to the result, at once. Its methods raise the errors of the call.

    Raises:
        PeerLost: The callee is gone.
        RpcError: Something cannot be sent, or there is no such worker.
        UsageError: An argument has the wrong type.

    Cost:
        One message to the callee; the reports that the value was made and that this process holds
        it travel with other messages.

    Example:
        ```python
        weight = rpc.remote(f"worker{1 - rank}", torch.zeros, (2, 2))
        assert weight.to_here().shape == (2, 2)
        ```
    """
    if _profiler_runs():
        return profiling.call(current(), "remote", to, func, args, kwargs, timeout)
    return current().remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and id of a worker.

    Args:
        worker_name: Its name; if None, this process.

    Returns:
        A `WorkerInfo`.

    Raises:
        RpcError: RPC has not been initialized, or there is no such worker.
        PeerLost: The worker is gone.

    Example:
        ```python
        assert rpc.get_worker_info().id == rank
        ```
    """
    agent = current()
    return agent.me if worker_name is None else agent.find(worker_name)


def get_rpc_timeout() -> float:
    """Return the timeout of calls that specify none.

    Returns:
        Seconds; 0 for no timeout.

    Raises:
        RpcError: RPC has not been initialized.

    Example:
        ```python
        assert rpc.get_rpc_timeout() == 60.0
        ```
    """
    return current().timeout


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End RPC in this process.

    Args:
        graceful: Whether to wait first: with a world size, until all workers have called this and
            no call is pending or runs on any of them, where a worker that dies counts as done; with
            dynamic membership, until no call of this process is pending and none runs here.
        timeout: How long to wait, in seconds; 0 for no limit.

    Collective:
        With `graceful` and a world size all workers call, and wait for each other.

    Raises:
        RpcError: RPC has not been initialized, or the wait has timed out; RPC has ended in this
            process anyway.
        UsageError: `timeout` is not a number of seconds.

    Cost:
        With `graceful` and a world size four or more calls per worker.

    Example:
        ```python
        rpc.shutdown()  # a worker that only serves calls waits here until the others are done
        ```
    """
    agent = current()
    check_seconds(timeout, "shutdown")
    together = False
    try:
        if graceful:
            (wait_all_workers if agent.static else wait_for_own)(agent, timeout)
            together = agent.static
    finally:
        set_current(None)
        agent.close(known=together)
        if not recording():
            signals.remove()


def _set_rpc_timeout(rpc_timeout: float) -> None:  # pyright: ignore[reportUnusedFunction]
    """Set the timeout of later calls that specify none."""
    check_seconds(rpc_timeout, "_set_rpc_timeout")
    current().timeout = rpc_timeout


def _is_current_rpc_agent_set() -> bool:  # pyright: ignore[reportUnusedFunction]
    """Whether RPC has been initialized."""
    return is_set()


@contextmanager
def _wait_all() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """At the end of a block, wait for all futures that `rpc_async` returned to this thread in it.

    Raises:
        Exception: The first error of one of them.
    """
    _here.futures = list[torch.futures.Future[Any]]()
    try:
        yield
    finally:
        futures = _here.futures
        del _here.futures
        for future in futures:
            future.wait()


def _rref_context_get_debug_info() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
    """Return the counts of references."""
    figures = current().debug_info()
    return {name: figure for name, figure in figures.items() if name.startswith("num_")}


def _get_debug_info() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
    """Return the counts of calls and references."""
    return current().debug_info()
