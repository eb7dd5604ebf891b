"""Conversion of the arguments of torch's process groups to those of Dure's.

Torch's process groups take lists of tensors (one per device of the process, so here always one) and
an options object; some forms take plain tensors and arguments instead. An unset time limit is
-1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dure.comm.ops import ReduceOp, as_reduce_op
from dure.errors import UsageError
from dure.torch_private import c10d, not_supported

__all__ = ["Mode", "mode_of", "only", "reduction_of", "root_of", "slots"]

Mode = tuple[bool, timedelta | None]
"""Whether the call is asynchronous, and the time limit of its `wait` (None: the group's)."""

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
    """Return the only element of a list (a tensor or a list of tensors); a tensor as it is."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(
            "expected a list of one",
            op=op,
            seen=f"{len(tensors)} members",
            fix="Pass one tensor per process; use one process per device.",
        )
    return tensors[0]


def slots(lists: Any, op: str) -> Sequence[torch.Tensor]:
    """Return the list of tensors in `lists`, or `lists` itself if it is a list of tensors."""
    if lists and isinstance(lists[0], torch.Tensor):
        return lists
    return only(lists, op)


def reduction_of(opts: object) -> ReduceOp:
    """Return the reduction of an options object, or `opts` itself; SUM for None."""
    if opts is None:
        return ReduceOp.SUM
    theirs: Any = getattr(opts, "reduceOp", opts)
    if theirs == _SUM:  # no dictionary: all of torch's reductions have the same hash
        return ReduceOp.SUM
    for candidate, ours in _OTHERS:
        if theirs == candidate:
            return ours
    if theirs == _PREMULTIPLIED:
        if not hasattr(theirs, "factor"):
            raise not_supported(["factor of torch.distributed.ReduceOp"], "2.13")
        return ReduceOp.premul_sum(theirs.factor)
    return as_reduce_op(theirs)


def root_of(opts: object) -> int:
    """Return the root's group rank from an options object or a number; 0 for None."""
    if opts is None:
        return 0
    return opts if isinstance(opts, int) else opts.rootRank  # pyright: ignore[reportAttributeAccessIssue]


def mode_of(opts: object, timeout: timedelta | None = None) -> Mode:
    """Return the mode of a call: that of `asyncOp`, or asynchronous if it has a time limit.

    The limit applies to the `wait` of the work, so a call with a limit needs a work to wait for.
    """
    limit = getattr(opts, "timeout", None) if timeout is None else timeout
    if isinstance(limit, timedelta) and limit > _UNLIMITED:
        return True, limit
    return getattr(opts, "asyncOp", True), None
