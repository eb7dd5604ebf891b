"""Tensors made after the shape of another: `full_like`, `new_zeros` and their like.

What has the other's shape lies as the other does; what has a shape of its own is whole on each
rank. Only zeros are terms of a sum again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Placement, Replicate, Shard
from dure.tensor.rules import rule
from dure.tensor.rules.pointwise import pointwise
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten


@rule(aten.full_like.default, aten.ones_like.default, aten.empty_like.default)
def _like(call: OpCall) -> list[Strategy]:
    return pointwise(call)


_NEW = (
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip


def _sized(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any]:
    """Give the operator the size of this rank's part in place of the whole's."""
    (result,) = results
    assert result is not None
    size, op = result.local_shape, call.op
    return lambda tensor, _, *args, **kwargs: op(tensor, size, *args, **kwargs)


@rule(*_NEW, local=_sized)
def _new(call: OpCall) -> list[Strategy]:
    (given,), (made,) = call.operands, call.outputs
    assert made is not None
    kept: list[Placement] = [p for p in given.placements if not isinstance(p, Shard)]
    found = [Strategy((placement,), (Replicate(),)) for placement in kept]
    for dim in range(given.ndim):
        out = Shard(dim) if made.shape == given.shape else Replicate()
        found.append(Strategy((Shard(dim),), (out,)))
    return found
