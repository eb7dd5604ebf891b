"""New tensors made after another: what they are like decides placements, not values.

A tensor of the same shape is cut as its model is; terms as a model give a whole one. One of another
shape is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Replicate, Shard
from dure.tensor.registry import rule
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten
R = Replicate()


def _alike(call: OpCall) -> list[Strategy]:
    spec, (result,) = call.operands[0], call.outputs
    assert result is not None
    given = dict.fromkeys(spec.placements)
    if spec.shape != result.shape:
        return [Strategy((p,), (R,)) for p in given]
    found = [Strategy((cut,), (cut,)) for cut in map(Shard, range(spec.ndim))]
    return found + [Strategy((p,), (R,)) for p in given if p.is_partial()]


@rule(aten.empty_like.default, aten.ones_like.default, aten.full_like.default)
def _like(call: OpCall) -> list[Strategy]:
    return _alike(call)


def _sized_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any]:
    """Give the operator the size of this rank's part."""
    result, op = results[0], call.op
    assert result is not None
    shape = list(result.local_shape)
    if op is not aten.new_empty_strided.default:
        return lambda model, size, *args, **kwargs: op(model, shape, *args, **kwargs)
    if shape == list(result.shape):
        return op
    return lambda model, size, stride, **kwargs: aten.new_empty(model, shape, **kwargs)


@rule(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default, local=_sized_local,
)  # fmt: skip
def _new(call: OpCall) -> list[Strategy]:
    return _alike(call)
