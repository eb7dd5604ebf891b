"""Calls, references and workers: the functions that programs use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dure.errors import PeerLost, UsageError
from dure.rpc import profiling
from dure.rpc.agent import UNSET
from dure.rpc.current import current, is_set
from dure.rpc.names import WorkerInfo
from dure.rpc.rref import RRef

__all__ = [
    "get_rpc_timeout",
    "get_worker_info",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
]

_profiler_runs = torch.autograd._profiler_enabled  # pyright: ignore

_here = threading.local()
"""`futures`: those that `_wait_all` waits for."""


def is_available() -> bool:
    """Whether there is RPC: always."""
    return True


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
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
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET,
) -> torch.futures.Future[Any]:
    """Begin to call a function of another process; arguments and errors as in `rpc_sync`.

    The arguments may be changed when this returns. It waits only in threads of the program, while
    more than 1 GiB of unanswered calls to that process is under way.

    Returns:
        A future of what the function returns; errors that come after this are raised by it, and
        that the callee is gone.
    """
    future: torch.futures.Future[Any]
    try:
        if _profiler_runs():
            future = profiling.call(current(), "async", to, func, args, kwargs, timeout)
        else:
            future = current().rpc_async(to, func, args, kwargs, timeout)
    except PeerLost as error:
        future = torch.futures.Future()
        future.set_exception(error)
    if hasattr(_here, "futures"):
        _here.futures.append(future)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef[Any]:
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
    if rpc_timeout < 0:
        raise UsageError("a timeout is 0 or more seconds", seen=str(rpc_timeout))
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


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return how many references there are."""
    return current().references_info()


def _get_debug_info() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
    """Return figures of calls and references, for people."""
    return current().get_debug_info() | _rref_context_get_debug_info()
