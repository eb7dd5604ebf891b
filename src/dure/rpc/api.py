"""The beginning and the end of RPC, calls, references and workers: what programs use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc import backend_registry, profiling
from dure.rpc.agent import Agent
from dure.rpc.allow import Allowed
from dure.rpc.autograd.backward import attach
from dure.rpc.backend_registry import RpcBackendOptions, TensorPipeRpcBackendOptions
from dure.rpc.caller import UNSET, To
from dure.rpc.checks import check, check_seconds
from dure.rpc.current import current, is_set, set_current
from dure.rpc.meeting import Meeting, connect
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
"""A function whose result, or whose future's (`functions.async_execution`), is a T."""

_log = logs.logger("rpc")

_profiler_runs = torch.autograd._profiler_enabled  # pyright: ignore

_here = threading.local()
"""`futures`: those that `_wait_all` waits for."""


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
        allow: Functions, classes and modules that others may call; None: everything. With a list,
            messages bring plain values, tensors, references and these functions only.
        store: A store to meet in, in place of the options' `init_method`.

    Collective:
        With a world size all call, and wait for each other.

    Raises:
        RpcError: RPC is initialized already, or the name cannot be one.
        RendezvousError: The processes could not meet, or two have one name.
        UsageError: An argument is of the wrong kind, or the rank too large; something of `allow`
            cannot be allowed by name.
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
    allowed = None if allow is None else Allowed(allow)
    meeting = Meeting(
        name=name,
        rank=rank,
        world_size=world_size,
        init_method=options.init_method,
        store=store,
        timeout=timedelta(seconds=min(options.rpc_timeout or 1800.0, 86_400.0)),
    )
    with ExitStack() as opened:
        transport = connect(meeting, options.num_worker_threads)
        opened.callback(transport.close)
        me = WorkerInfo(name, transport.peers.own_id)
        agent = Agent(me, transport, options.rpc_timeout, allowed, static=world_size is not None)
        opened.callback(agent.close)
        agent.device_maps = options.device_maps
        attach(agent)
        profiling.follow_profiler()
        set_current(agent)
        opened.callback(set_current, None)
        agent.start()
        signals.install()
        opened.pop_all()
    _report(agent, options)


@logs.never_fails
def _report(agent: Agent, options: TensorPipeRpcBackendOptions) -> None:
    """Write one line about the world of RPC that this process has joined."""
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
    """Tell at once what cannot be a process's place in a world.

    Raises:
        UsageError: It is of the wrong kind, or too large.
        RpcError: The name cannot be one.
    """
    op, fix = "init_rpc", "Leave it out, or give -1, for the environment's."
    check(name, str, "the name of a worker is a string", op=op, fix="Give each one of its own.")
    check(rank, int, "a rank is a whole number", op=op, fix=fix)
    check(world_size, int | None, "a world size is a whole number", op=op, fix=fix)
    check(store, Store | None, "this is no store", op=op, fix="Give one of `dure.store`.")
    assert isinstance(name, str)
    assert isinstance(rank, int)
    WorkerInfo(name, 0)
    if rank >= MOST_IDS:
        most = f"Ranks are below {MOST_IDS:,}; leave it out for any, where processes come and go."
        raise UsageError("the rank is too large", op=op, seen=str(rank), fix=most)


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
    check_seconds(timeout, "shutdown")
    together = False
    try:
        if graceful:
            (wait_all_workers if agent.static else wait_for_own)(agent, timeout)
            together = agent.static
            for held in agent.held():
                _log.info("at the end of RPC the program still holds %s", held)
    finally:
        set_current(None)
        agent.close(known=together)
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
    """Wait for the workers named, this one among them, which wait for each other."""
    all_gather(current(), None, worker_names)


def is_available() -> bool:
    """Whether there is RPC: always."""
    return True


def rpc_sync(
    to: To, func: Function[T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET
) -> T:
    """Call a function of another process, or of this one, and return what it returns.

    The function goes by name, the arguments are copied; tensors share memory there where they do
    here. It runs at most once.

    Args:
        to: Name, id or `WorkerInfo`.
        func: A function that the callee has under the same name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds; -1: the default, 0: none. A function that runs longer is not stopped.

    Raises:
        Exception: What the function raises: its type, the remote traceback in its text.
        PeerLost: The callee is gone.
        RpcError: The time is over; the connection broke, and the call may have run; something
            cannot be sent; there is no such worker; the callee does not allow it.

    Cost:
        One message there and one back.
    """
    if _profiler_runs():
        return profiling.call(current(), "sync", to, func, args, kwargs, timeout)
    return current().rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To, func: Function[T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET
) -> torch.futures.Future[T]:
    """Begin to call a function of another process; arguments and errors as in `rpc_sync`.

    The arguments may be changed when this returns. It waits only in threads of the program, while
    more than 1 GiB of unanswered calls to that process is under way.

    Returns:
        A future of what the function returns; errors that come after this are raised by it, and
        that the callee is gone.
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
    """Begin to call a function of another process that keeps the result; arguments as `rpc_sync`.

    Returns:
        A reference to the result, at once; what goes wrong is raised by its methods.
    """
    if _profiler_runs():
        return profiling.call(current(), "remote", to, func, args, kwargs, timeout)
    return current().remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return name and id of a worker; None: of this process.

    Raises:
        RpcError: There is no such worker.
        PeerLost: It is gone.
    """
    agent = current()
    return agent.me if worker_name is None else agent.find(worker_name)


def get_rpc_timeout() -> float:
    """Return the timeout of calls that give none, in seconds; 0 is none."""
    return current().timeout


def _set_rpc_timeout(rpc_timeout: float) -> None:  # pyright: ignore[reportUnusedFunction]
    """Set the timeout of calls that are made from now on and give none."""
    check_seconds(rpc_timeout, "_set_rpc_timeout")
    current().timeout = rpc_timeout


def _is_current_rpc_agent_set() -> bool:  # pyright: ignore[reportUnusedFunction]
    """Whether RPC has been initialized."""
    return is_set()


@contextmanager
def _wait_all() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """At the end: wait for all futures that `rpc_async` has returned within, in this thread.

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
    """Return how many references there are."""
    figures = current().debug_info()
    return {name: figure for name, figure in figures.items() if name.startswith("num_")}


def _get_debug_info() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
    """Return figures of calls and references, for people."""
    return current().debug_info()
