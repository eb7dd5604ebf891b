"""Embedding: look up rows of a table.

The columns of the table, the indices, or the rows of the table may be sharded. If the rows are,
each rank returns the rows that it has and zeros for the others, so the result is Partial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.comm.capture import has_no_values
from dure.tensor.call import SUM, AxisStrategy, OpCall, R, with_one
from dure.tensor.placement_types import Shard
from dure.tensor.registry import rule

__all__ = ["own_rows"]

aten = torch.ops.aten


def own_rows(numbers: torch.Tensor, run: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices relative to this rank's run, and a mask of those outside of the run."""
    size, first = run
    own = numbers - first
    missing = (own < 0) | (own >= size)
    return own.masked_fill(missing, 0), missing


def _lookup_local(call: OpCall) -> Callable[..., Any] | None:
    """Look up the rows that this rank has.

    Raises:
        IndexError: An index is out of range of the full table, as by the operator itself.
    """
    table, op = call.operands[0], call.op
    if not table.cuts(0):
        return None
    run = table.runs(0)[0]

    def lookup(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        unread = indices.is_cuda or has_no_values((indices,))
        if not unread and ((indices < 0) | (indices >= table.shape[0])).any():
            raise IndexError("index out of range in self")
        if not weight.shape[0]:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        own, missing = own_rows(indices, run)
        found = op(weight, own)
        return found.masked_fill_(missing.unsqueeze(-1), 0)

    return lookup


@rule(aten.embedding.default, local=_lookup_local, contiguous=True)
def _embedding(call: OpCall) -> list[AxisStrategy]:
    indices = call.operands[1]
    last = indices.ndim
    found = [AxisStrategy((R, Shard(dim)), (Shard(dim),)) for dim in range(indices.ndim)]
    found += [AxisStrategy((Shard(1), R), (Shard(last),)), AxisStrategy((Shard(0), R), (SUM,))]
    return found + with_one(call)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: OpCall) -> list[AxisStrategy]:
    grad, indices = call.operands
    found = [AxisStrategy((Shard(grad.ndim - 1), R), (Shard(1),))]
    if not call.arg("scale_grad_by_freq"):
        rows = map(Shard, range(indices.ndim))
        found += [AxisStrategy((row, row), (SUM,)) for row in rows]
    return found + with_one(call)
