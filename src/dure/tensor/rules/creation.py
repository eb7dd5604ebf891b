"""New tensors made after another: what they are like decides placements, not values.

A tensor of the same shape is cut as its model is; terms as a model give a whole one. One of another
shape is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import OpCall, R, Strategy, alike
from dure.tensor.placement_types import Shard
from dure.tensor.registry import rule, with_local_size

aten = torch.ops.aten


def _sized_local(call: OpCall) -> Callable[..., Any]:
    """Give the operator the size of this rank's part."""
    if call.op is not aten.new_empty_strided.default:
        return with_local_size(call)
    shape = call.result.local_shape
    if shape == call.result.shape:
        return call.op
    order = call.result.order
    if order is None:
        return lambda model, size, stride, **kwargs: aten.new_empty(model, shape, **kwargs)
    ordered, back = [shape[dim] for dim in order], [order.index(dim) for dim in range(len(order))]
    return lambda model, size, stride, **kwargs: aten.new_empty(model, ordered, **kwargs).permute(
        back
    )


@rule(aten.empty_like.default, aten.ones_like.default, aten.full_like.default)
@rule(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default, local=_sized_local,
)  # fmt: skip
def _like(call: OpCall) -> list[Strategy]:
    spec = call.operands[0]
    given = dict.fromkeys(spec.placements)
    if spec.shape != call.output.shape:
        return [Strategy((p,), (R,)) for p in given]
    found = alike(call, map(Shard, range(spec.ndim)))
    return found + [Strategy((p,), (R,)) for p in given if p.is_partial()]
