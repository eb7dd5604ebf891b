"""Events of torch's profiler for operations, such as "dure:all_reduce", with shapes.

An event starts in the call and ends with the operation, on another thread. It is marked as
asynchronous, so that it does not contain the caller's later events. Torch's profiler needs a future
to end an event on another thread. A thread of the group's `Waiters` sets it when the operation has
ended; `wait` of the operation also waits for that, so that a profile does not end before the event.

Without a profiler, this costs one test per call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as torch_dist

from dure import torch_private
from dure.torch_backend.compiling import opaque
from dure.torch_backend.work import TorchWork

__all__ = ["profiled"]

_is_profiling = torch_private.profiler_enabled
_begin = torch_private.record_function_enter

Method = Callable[..., Any]


def profiled(name: str, inputs: int | None = 0) -> Callable[[Method], Method]:
    """Make a group's method appear in torch's profiler.

    Args:
        name: Name of the operation, shown after the backend's name.
        inputs: Index of the argument whose shapes are shown; None for no shapes.
    """

    def decorate(method: Method) -> Method:
        @opaque
        @functools.wraps(method)
        def run(self: Any, *args: Any, **more: Any) -> Any:
            if not _is_profiling():
                return method(self, *args, **more)
            shown = [] if inputs is None else list(_tensors(args[inputs : inputs + 1]))
            return _profile(self, name, shown, functools.partial(method, self, *args, **more))

        return run

    return decorate


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    for item in nested:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


def _profile(group: Any, name: str, shown: list[torch.Tensor], call: Callable[[], Any]) -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    record = _begin(f"{_known_as(group)}:{name}", *shown)
    torch_private.call_end_callbacks(record, future)
    over = threading.Event()

    def end(work: TorchWork | None = None) -> None:
        if work is not None:
            work.settle()
        future.set_result(None)
        over.set()

    try:
        work = call()
    except BaseException:
        group.run_aside(end)
        raise
    if isinstance(work, TorchWork) and not work.is_completed():
        work.recorded = over
        group.run_aside(lambda: end(work))
    else:
        group.run_aside(end)
        over.wait()
    return work


def _known_as(group: Any) -> str:
    """Return the name of the backend that the program asked torch for."""
    try:
        return torch_dist.get_backend(group)
    except (ValueError, RuntimeError):
        return group.name()  # not one of torch.distributed's own groups
