"""What torch's callers pass, in our terms: lists of one tensor, option objects, reductions, limits.

Torch's process groups take tensors in lists (one for each device of a process, of which there is
only one) and the rest in an options object; some forms take bare tensors and arguments instead.
A time limit that was not set arrives as -1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from dure.comm.ops import ReduceOp, as_reduce_op
from dure.errors import UsageError

__all__ = ["Mode", "mode_of", "only", "reduction_of", "root_of", "slots"]

Mode = tuple[bool, timedelta | None]
"""Whether to return before the operation is done, and how long to wait for it then, if limited."""

_UNLIMITED = timedelta(0)
_SUM = c10d.ReduceOp.SUM
_PREMULTIPLIED = c10d.ReduceOp.PREMUL_SUM
_OTHERS = [
    (getattr(c10d.ReduceOp, op.name), op)
    for op in (
        *(ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
        *(ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR),
    )
]


def only(tensors: Any, op: str) -> Any:
    """Return the one member of a list (a tensor, or a list of them); a bare tensor as it is."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(
            "expected a list of one",
            op=op,
            seen=f"{len(tensors)} members",
            fix="One process has one tensor; use a process for each device.",
        )
    return tensors[0]


def slots(lists: Any, op: str) -> Sequence[torch.Tensor]:
    """Return the list of tensors that `lists` holds, or is."""
    if lists and isinstance(lists[0], torch.Tensor):
        return lists
    return only(lists, op)


def reduction_of(opts: object) -> ReduceOp:
    """Return the reduction that an options object holds, or that `opts` is; SUM for None."""
    if opts is None:
        return ReduceOp.SUM
    theirs: Any = getattr(opts, "reduceOp", opts)
    if theirs == _SUM:  # torch's are objects whose hashes are all alike: no dictionary helps
        return ReduceOp.SUM
    for candidate, ours in _OTHERS:
        if theirs == candidate:
            return ours
    if theirs == _PREMULTIPLIED:
        return ReduceOp.premul_sum(theirs.factor)
    return as_reduce_op(theirs)


def root_of(opts: object) -> int:
    """Return the root's group rank, from an options object or a bare number; 0 for None."""
    if opts is None:
        return 0
    return opts if isinstance(opts, int) else opts.rootRank  # pyright: ignore[reportAttributeAccessIssue]


def mode_of(opts: object, timeout: timedelta | None = None) -> Mode:
    """Return how to run a call: what `asyncOp` says, unless it has a time limit of its own.

    A call with a limit is always started and then waited for, because the limit is the waiter's.
    """
    limit = getattr(opts, "timeout", None) if timeout is None else timeout
    if isinstance(limit, timedelta) and limit > _UNLIMITED:
        return True, limit
    return getattr(opts, "asyncOp", True), None
