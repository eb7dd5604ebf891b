"""Operations and steps in torch's profilers, under the names that torch's own have.

While a profiler runs (torch.profiler, emit_nvtx, emit_itt), an operation of a group is two records:

    c10d::allreduce_      the call; its arguments are the group, dtype, elements, bytes, ...
      shm:all_reduce      the operation on the backend

An asynchronous operation has two records: the call, which ends when the operation has been started,
and ``c10d::wait (all_reduce)``, the time that `Work.wait` takes.

The arguments have the names that NCCL's ``record_param_comms`` has in torch. (That name itself is
reserved: torch crashes if a record of Python has it.) A profile shows them with
``record_shapes=True``.

No record lives longer than a call. Torch can end one on another thread, when an asynchronous
operation ends; but if the profile was closed before, it then writes into memory that was freed.

No record is made twice: the engines of Gloo and NCCL record what happens on the backend themselves
(`makes_records`), and a program that uses Dure as a backend of torch.distributed has those of the
plug-in (`GroupCore.in_torch`, torch_backend/profiling.py).

*Steps* (a forward, a bucket, a gather) are records of one range each: `recorded`, `step`.

`profiler._is_profiler_enabled` is True while a profiler runs in any thread of the process. Without
one, a call costs one look at it: here in Python, and in the engine, which then declines the call
(`is_watched` in csrc/bindings/tensor.cpp), so that it comes here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from dure import torch_private
from dure.comm.call import Call
from dure.comm.untraced import untraced_below

if TYPE_CHECKING:
    from dure.comm.backends.base import Backend
    from dure.comm.group.core import GroupCore

__all__ = [
    "UNRECORDED",
    "communicating",
    "operation",
    "profiler",
    "recorded",
    "redistributing",
    "step",
    "waiting",
]

P = ParamSpec("P")
T = TypeVar("T")

profiler = torch_private.profiler
"""Its `_is_profiler_enabled` is True while a profiler runs."""

UNRECORDED = nullcontext()
"""Used instead of `step(...)` while no profiler runs."""

_RANKS_SHOWN = 30
_Range: Any = torch_private.RecordFunctionFast

_NAMES = {
    "all_reduce": ("c10d::allreduce_", "allreduce"),
    "broadcast": ("c10d::broadcast_", "broadcast"),
    "reduce": ("c10d::reduce_", "reduce"),
    "all_gather": ("c10d::allgather_", "all_gather"),
    "all_gather_single": ("c10d::_allgather_base_", "_allgather_base"),
    "gather": ("c10d::gather_", "gather"),
    "scatter": ("c10d::scatter_", "scatter"),
    "reduce_scatter": ("c10d::reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": ("c10d::_reduce_scatter_base_", "_reduce_scatter_base"),
    "all_to_all": ("c10d::alltoall_", "all_to_all"),
    "all_to_all_single": ("c10d::alltoall_base_", "all_to_all"),
    "barrier": ("c10d::barrier", "barrier"),
    "send": ("c10d::send", "send"),
    "recv": ("c10d::recv_", "recv"),
}
"""Torch's name of an operation, and "Collective name" in NCCL's records."""


@untraced_below
def operation(
    group: GroupCore, backend: Backend, call: Call, deferred: bool
) -> AbstractContextManager[object]:
    """Return a context around the start of an operation, which records it.

    Args:
        group: The group; the operation gets its number `seq` + 1.
        backend: Runs the operation.
        call: The operation and its tensors.
        deferred: Whether the operation continues after the block.
    """
    if group.in_torch:
        return UNRECORDED
    op = "send" if call.op == "isend" else "recv" if call.op == "irecv" else call.op
    name, collective = _NAMES.get(op, (f"dure::{op}", op))
    if op == "recv" and call.peer is None:
        name = "c10d::recv_any_source_"
    shapes = _shapes(call)
    outer = _Range(name, shapes, _fields(group, call, collective, deferred))
    if deferred or getattr(backend, "makes_records", False):
        return outer
    return _Nested(outer, _Range(f"{backend.name}:{op.removesuffix('_single')}", shapes))


class _Nested:
    """A range within another."""

    def __init__(self, *ranges: Any) -> None:
        self._ranges = ranges

    def __enter__(self) -> None:
        for each in self._ranges:
            each.__enter__()

    def __exit__(self, *error: object) -> None:
        for each in reversed(self._ranges):
            each.__exit__(*error)


@untraced_below
def waiting(op: str) -> AbstractContextManager[object]:
    """Return the range of a wait for an operation that was started."""
    return _Range(f"c10d::wait ({op})")


def _shapes(call: Call) -> Sequence[Any]:
    """Return the tensors whose shapes a record shows: outputs, then inputs."""
    sides = [call.inputs] if call.inputs is call.outputs else [call.outputs, call.inputs]
    return [side[0] if len(side) == 1 else list(side) for side in sides if side]


def _fields(group: GroupCore, call: Call, collective: str, deferred: bool) -> dict[str, Any]:
    """Return the arguments of a record, under torch's names."""
    message = {"send": "Dst Rank", "recv": "Src Rank"}.get(collective)
    peer = call.root if call.root >= 0 else call.peer
    more: dict[str, Any] = {}
    if collective == "all_to_all":
        more["In split size"] = str(
            [t.numel() for t in call.inputs] if len(call.inputs) > 1 else []
        )
        out = [t.numel() for t in call.outputs] if len(call.outputs) > 1 else []
        more["Out split size"] = str(out)
    if peer is not None:
        more[message or "Root rank"] = group.global_ranks[peer]
    return {
        "Collective name": collective,
        "In msg nelems": sum(t.numel() for t in call.inputs),
        "Out msg nelems": sum(t.numel() for t in call.outputs),
        **_size(call.inputs or call.outputs),
        **_place(group),
        "Seq": group.seq + 1,
        "Is asynchronized op": deferred,
        **more,
    }


def _size(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    kind = tensors[0].type() if tensors else "torch.ByteTensor"  # "Byte": as C++ writes uint8
    return {
        "dtype": kind.rpartition(".")[2].removesuffix("Tensor"),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as text; of large groups the first ones, as each record has this text."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return f"[{shown}, ...]" if len(ranks) > _RANKS_SHOWN else f"[{shown}]"


def _place(group: GroupCore) -> dict[str, Any]:
    ranks = group.global_ranks
    return {
        "Group size": len(ranks),
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Process Group Ranks": _listed(ranks),
        "Global rank start": ranks[0],
        "Global rank stride": ranks[1] - ranks[0] if len(ranks) > 1 else 0,
        "Rank": ranks[group.rank()],
    }


@untraced_below
def step(name: str, of: str = "") -> AbstractContextManager[object]:
    """Return the range of a step, such as ``FSDP::all_gather (layers.0)``; only while one profiles.

    `of`: which one of several; "" and "(root)" are left out.
    """
    return profiler.record_function(f"{name} ({of})" if of not in ("", "(root)") else name)


@untraced_below
def communicating(
    name: str, group: GroupCore, tensor: torch.Tensor
) -> AbstractContextManager[object]:
    """Return the range of a step that communicates `tensor`, with arguments as operations have."""
    return _Range(name, [tensor], {**_size([tensor]), **_place(group)})


@untraced_below
def redistributing(tensor: torch.Tensor, what: str) -> AbstractContextManager[object]:
    """Return the range of a redistribution of `tensor`; `what` names both specs.

    It is no operator, which a graph that is captured would keep.
    """
    return _Range("Redistribute", [tensor], {**_size([tensor]), "placements": what})


def recorded(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make calls of a function steps of this name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return run

    return decorate
