"""Pointwise operators: each element of the result needs the elements at its place.

A dimension of the result may be sharded if every operand that has it (operands are aligned at their
last dimension, sizes of 1 are repeated) is sharded alike. Terms of a sum go through what is linear:
all operands of an addition as terms, or one factor of a product while the other is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.tensor.call import LINEAR, OpCall, R, Strategy, alike, with_one
from dure.tensor.placement_types import Partial, Placement, Shard
from dure.tensor.registry import by_value, rule
from dure.tensor.spec import DTensorSpec

__all__ = ["aligned", "aligned_cuts", "pointwise"]

aten = torch.ops.aten
ORDERED = (Partial("min"), Partial("max"))


def aligned(spec: DTensorSpec, shape: Sequence[int], dim: int) -> Placement:
    """Return how an operand must lie where the result is sharded on `dim`."""
    own = dim - (len(shape) - spec.ndim)
    return Shard(own) if own >= 0 and spec.shape[own] == shape[dim] else R


def aligned_cuts(call: OpCall, shape: Sequence[int]) -> list[tuple[Shard, tuple[Placement, ...]]]:
    """Return the cuts of a result, and for each how the operands must lie."""
    dims = range(len(shape))
    return [(Shard(d), tuple(aligned(spec, shape, d) for spec in call.operands)) for d in dims]


# The tag, and operators that torch does not give it.
@rule(
    torch.Tag.pointwise,
    aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Scalar, aten.fill_.Tensor,
)  # fmt: skip
def pointwise(call: OpCall) -> list[Strategy]:
    """Return what is legal for every pointwise operator: shards of the result's dimensions."""
    shape = next(meta.shape for meta in call.outputs if meta is not None)
    count = len(call.outputs)
    return [Strategy(inputs, (cut,) * count) for cut, inputs in aligned_cuts(call, shape)]


@rule(
    aten.neg.default, aten.clone.default, aten.neg_.default, aten.positive.default,
    aten.zeros_like.default, aten.zero_.default,
)  # fmt: skip
def _unary_linear(call: OpCall) -> list[Strategy]:
    terms = LINEAR if "neg" in call.name else (*LINEAR, *ORDERED)
    return pointwise(call) + alike(call, terms)


@rule(
    aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.add.out,
)  # fmt: skip
def _sum(call: OpCall) -> list[Strategy]:
    both = len(call.operands) == len([n for n in ("self", "other") if call.operand(n) is not None])
    return pointwise(call) + (alike(call, LINEAR) if both and len(call.operands) > 1 else [])


@rule(aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar)
def _product(call: OpCall) -> list[Strategy]:
    found = pointwise(call)
    for number in range(len(call.operands)):
        found += with_one(call, number=number)
    return found


@rule(aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar)
def _quotient(call: OpCall) -> list[Strategy]:
    return pointwise(call) + (with_one(call) if call.operand("self") == 0 else [])


by_value.update({aten.masked_fill.Scalar, aten.masked_fill_.Scalar})


@rule(aten.masked_fill.Scalar, aten.masked_fill_.Scalar)
def _masked_fill(call: OpCall) -> list[Strategy]:
    return pointwise(call) + (with_one(call) if call.arg("value") == 0 else [])


@rule(aten._to_copy.default)
def _cast(call: OpCall) -> list[Strategy]:
    found, dtype = pointwise(call), call.arg("dtype")
    if dtype is None or _casts_terms(call.operands[0].meta.dtype, dtype):
        found += alike(call, LINEAR)
    return found


def _casts_terms(given: torch.dtype, to: torch.dtype) -> bool:
    """Tell whether the sum of terms that are cast is the cast sum."""
    return given == to or (given.is_floating_point and to.is_floating_point)


@rule(aten.copy_.default)
def _copy(call: OpCall) -> list[Strategy]:
    to, given = call.operands[0].meta, call.operands[-1].meta
    same = to.shape == given.shape and _casts_terms(given.dtype, to.dtype)
    return pointwise(call) + (alike(call, (*LINEAR, *ORDERED)) if same else [])
