"""Pointwise operators: each element of the result depends on the operands' elements at its index.

A dimension of the result may be sharded if every operand that has it is sharded in the same way
(operands are broadcast: aligned at their last dimension, sizes of 1 are repeated).

Operators that preserve a reduction keep Partial placements. A sum is preserved by linear operators:
if all operands of an addition are Partial, or one factor of a product while the other is
replicated. Partial(max) and Partial(min) are kept by non-decreasing functions; a non-increasing
function turns one into the other. An average, maximum or minimum is kept if the same value is added
to each term.

`out=` has the result's placements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.tensor.call import (
    LINEAR,
    SUM,
    TERMS,
    AxisStrategy,
    Op,
    OpCall,
    R,
    linear_in,
    outs_of,
    same_placement,
    with_one,
)
from dure.tensor.placement_types import Partial, Placement, Shard
from dure.tensor.registry import by_value, rule
from dure.tensor.spec import DTensorSpec

__all__ = ["aligned", "aligned_cuts", "pointwise"]

aten = torch.ops.aten
AVG, MAX, MIN = map(Partial, ("avg", "max", "min"))
ORDERED = (MAX, MIN)


def aligned(spec: DTensorSpec, shape: Sequence[int], dim: int) -> Placement:
    """Return the placement that an operand must have if the result is sharded on `dim`."""
    own = dim - (len(shape) - spec.ndim)
    return Shard(own) if own >= 0 and spec.shape[own] == shape[dim] else R


def aligned_cuts(call: OpCall, shape: Sequence[int]) -> list[tuple[Shard, tuple[Placement, ...]]]:
    """Return the cuts of a result, and for each the placements that the operands must have."""
    dims = range(len(shape))
    return [(Shard(d), tuple(aligned(spec, shape, d) for spec in call.operands)) for d in dims]


# The tag, and operators that torch does not give it.
@rule(
    torch.Tag.pointwise,
    aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
)  # fmt: skip
def pointwise(call: OpCall) -> list[AxisStrategy]:
    """Return the strategies of every pointwise operator: cuts of the result's dimensions."""
    shape = next(meta.shape for meta in call.outputs if meta is not None)
    count = len(call.outputs)
    return [AxisStrategy(inputs, (cut,) * count) for cut, inputs in aligned_cuts(call, shape)]


def _through(call: OpCall, *found: tuple[Placement, ...]) -> list[AxisStrategy]:
    """Return the pointwise strategies, and those of `found` with as many operands as this call.

    Left out are averages of integers, and sums if casting each term gives another result than
    casting the sum.

    Args:
        call: The call.
        found: Placements of the result and of each operand except `out`, for all numbers of
            operands that operators of this name may have.
    """
    outs = outs_of(call) if len(call.outputs) == 1 else []
    strategies = pointwise(call)
    averages, made = AVG in linear_in(call), call.output.dtype
    added = [s for s in call.operands if any(p.is_partial("sum") for p in s.placements)]
    sums = all(_casts_terms(spec.meta.dtype, made) for spec in added)
    for result, *inputs in found:
        if result == SUM and not sums:
            continue
        if (averages or result != AVG) and len(inputs) == len(call.operands) - len(outs):
            there = [*inputs]
            for number in outs:
                there.insert(number, result)
            strategies.append(AxisStrategy(tuple(there), (result,) * len(call.outputs)))
    return strategies


def _named(names: str) -> list[Op]:
    """Return the functional, out= and in-place forms of operators."""
    found = [getattr(aten, name) for name in names.split()]
    found += [getattr(aten, f"{name}_") for name in names.split() if hasattr(aten, f"{name}_")]
    return [getattr(one, o) for one in found for o in one.overloads() if o in _FORMS]


_FORMS = ("default", "out", "decimals", "decimals_out")
_ONE_LINEAR = ((SUM, SUM), (AVG, AVG))
_RISING = ((MAX, MAX), (MIN, MIN))
_FALLING = ((MIN, MAX), (MAX, MIN))
_EITHER = tuple(both for p in ORDERED for both in ((p, p, R), (p, R, p)))


@rule(aten.zeros_like.default, aten.zero_.default)
def _zeros(call: OpCall) -> list[AxisStrategy]:
    return pointwise(call) + same_placement(call, TERMS)


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def _filled(call: OpCall) -> list[AxisStrategy]:
    terms = (AVG, MAX, MIN)
    return _through(call, *((p, p) for p in terms), *((p, p, R) for p in terms))


@rule(aten.clone.default, aten.positive.default)
def _same(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_ONE_LINEAR, *_RISING)


@rule(*_named("neg"))
def _negative(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_ONE_LINEAR, *(_FALLING if _keeps_order(call) else ()))


def _keeps_order(call: OpCall) -> bool:
    """Return whether sums and negatives keep or reverse the order; integers wrap around."""
    return call.output.dtype.is_floating_point


@rule(
    *_named(
        "asinh atan ceil deg2rad erf exp exp2 expm1 floor hardshrink rad2deg relu round "
        "sigmoid sinh special_modified_bessel_i1 tanh trunc"
    ),
    aten.clamp_min_.default, aten.clamp_max_.default,
)  # fmt: skip
def _rising(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_RISING)


@rule(*_named("erfc special_erfcx"))
def _falling(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_FALLING)


by_value.update(_named("threshold"))


@rule(*_named("threshold"))
def _threshold(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *(_RISING if call.arg("value") <= call.arg("threshold") else ()))


@rule(
    *(getattr(op, form) for op in (aten.add, aten.sub) for form in ("Tensor", "out")),
    aten.add_.Tensor, aten.sub_.Tensor,
)  # fmt: skip
def _sum(call: OpCall) -> list[AxisStrategy]:
    ordered = [(p, p, R) for p in ORDERED if _keeps_order(call)]
    return _through(call, (SUM, SUM, SUM), (AVG, AVG, AVG), (AVG, AVG, R), *ordered, (AVG, R, AVG))


@rule(
    aten.mul.Tensor, aten.mul.out, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar,
)  # fmt: skip
def _product(call: OpCall) -> list[AxisStrategy]:
    two = [(p, *both) for p in LINEAR for both in ((p, R), (R, p))]
    return _through(call, *_ONE_LINEAR, *two)


@rule(
    aten.div.Tensor, aten.div.out, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar,
    aten.special_xlog1py.default,
)  # fmt: skip
def _quotient(call: OpCall) -> list[AxisStrategy]:
    alone = _ONE_LINEAR if call.operand("self") == 0 and "div" in call.name else ()
    return _through(call, *alone, (SUM, SUM, R), (AVG, AVG, R))


@rule(*_named("logaddexp logaddexp2"))
def _rising_in_both(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_EITHER)


@rule(*_named("maximum"), aten.clamp_min.Tensor, aten.clamp_min_.Tensor)
def _larger(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_EITHER, (MAX, MAX, MAX))


@rule(*_named("minimum"), aten.clamp_max.Tensor, aten.clamp_max_.Tensor)
def _smaller(call: OpCall) -> list[AxisStrategy]:
    return _through(call, *_EITHER, (MIN, MIN, MIN))


by_value.update({aten.masked_fill.Scalar, aten.masked_fill_.Scalar})


@rule(aten.masked_fill.Scalar, aten.masked_fill_.Scalar)
def _masked_fill(call: OpCall) -> list[AxisStrategy]:
    return pointwise(call) + (with_one(call) if call.arg("value") == 0 else [])


@rule(aten._to_copy.default)
def _cast(call: OpCall) -> list[AxisStrategy]:
    found, dtype = pointwise(call), call.arg("dtype")
    if dtype is None or _casts_terms(call.operands[0].meta.dtype, dtype):
        ordered = ORDERED if dtype is None or not dtype.is_complex else ()
        found += same_placement(call, (*LINEAR, *ordered))
    return found


def _casts_terms(given: torch.dtype, to: torch.dtype) -> bool:
    """Return whether the sum of cast terms equals the cast sum."""
    return (
        given == to
        or (given.is_floating_point and (to.is_floating_point or to.is_complex))
        or (given.is_complex and to.is_complex)
    )


@rule(aten.copy_.default)
def _copy(call: OpCall) -> list[AxisStrategy]:
    to, given = call.operands[0].meta, call.operands[-1].meta
    ordered = () if to.dtype.is_complex else ORDERED
    terms = (*LINEAR, *ordered) if _casts_terms(given.dtype, to.dtype) else ()
    return pointwise(call) + same_placement(call, terms)
