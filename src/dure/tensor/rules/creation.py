"""New tensors that are created like another tensor (`ones_like`, `new_zeros`).

A tensor of the same shape is sharded like the model; if the model is Partial, or the shape is
another one, the new tensor is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import AxisStrategy, OpCall, R, same_placement
from dure.tensor.placement_types import Shard
from dure.tensor.registry import rule, with_local_size

aten = torch.ops.aten


def _sized_local(call: OpCall) -> Callable[..., Any]:
    """Pass the size of this rank's part, with strides in the same order."""
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
def _like(call: OpCall) -> list[AxisStrategy]:
    spec = call.operands[0]
    given = dict.fromkeys(spec.placements)
    if spec.shape != call.output.shape:
        return [AxisStrategy((p,), (R,)) for p in given]
    found = same_placement(call, map(Shard, range(spec.ndim)))
    return found + [AxisStrategy((p,), (R,)) for p in given if p.is_partial()]
