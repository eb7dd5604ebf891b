"""Operators that work along one dimension, or some: cuts through the others go along.

Sorting, cumulative sums, flips and shifts, padding, repeating, triangles, joining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.registry import by_value, rule
from dure.tensor.spec import DTensorSpec

__all__ = ["kept", "terms_of"]

aten = torch.ops.aten
R = Replicate()
LINEAR = (Partial("sum"), Partial("avg"))
TERMS = tuple(Partial(op) for op in ("sum", "avg", "min", "max", "product"))


def terms_of(call: OpCall, terms: Iterable[Placement]) -> list[Strategy]:
    """Return strategies in which all operands are terms, and so the results."""
    return [Strategy((p,) * len(call.operands), (p,) * len(call.outputs)) for p in terms]


def kept(call: OpCall, dims: Iterable[int]) -> list[Strategy]:
    """Return strategies in which operands and results are all cut along one of `dims`."""
    return terms_of(call, map(Shard, dims))


def _others(call: OpCall) -> list[int]:
    """Return the dimensions other than the one that the operator names."""
    ndim = call.operands[0].ndim
    return [d for d in range(ndim) if d != call.arg("dim") % ndim]


@rule(
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
)  # fmt: skip
def _along_one(call: OpCall) -> list[Strategy]:
    linear = call.op is aten.cumsum.default and call.operands[0].meta.dtype.is_floating_point
    return kept(call, _others(call)) + terms_of(call, LINEAR if linear else ())


@rule(aten.flip.default, aten.roll.default)
def _reordered(call: OpCall) -> list[Strategy]:
    ndim, dims = call.operands[0].ndim, call.arg("dims")
    flat = call.op is aten.roll.default and not dims
    moved = set(range(ndim)) if flat else {d % ndim for d in dims if ndim}
    return kept(call, (d for d in range(ndim) if d not in moved)) + terms_of(call, TERMS)


@rule(aten.renorm.default)
def _renorm(call: OpCall) -> list[Strategy]:
    return kept(call, [call.arg("dim") % call.operands[0].ndim])


by_value.add(aten.constant_pad_nd.default)


@rule(aten.constant_pad_nd.default)
def _padded(call: OpCall) -> list[Strategy]:
    ndim, pad = call.operands[0].ndim, call.arg("pad")
    same = [d for d in range(ndim) if not any(pad[2 * (ndim - 1 - d) : 2 * (ndim - d)])]
    return kept(call, same) + terms_of(call, LINEAR if call.arg("value") == 0 else ())


@rule(aten.repeat.default)
def _repeated(call: OpCall) -> list[Strategy]:
    spec, repeats = call.operands[0], call.arg("repeats")
    added = len(repeats) - spec.ndim
    same = [d for d in range(spec.ndim) if repeats[d + added] == 1]
    return [Strategy((Shard(d),), (Shard(d + added),)) for d in same] + terms_of(call, TERMS)


def _triangle_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Count the diagonal from where this rank's rows and columns begin."""
    spec, op = operands[0], call.op
    if spec.coordinate is None:
        return None
    (_, row), (_, column) = spec.runs(spec.ndim - 2)[0], spec.runs(spec.ndim - 1)[0]
    return lambda tensor, diagonal=0: op(tensor, diagonal + row - column)


@rule(aten.tril.default, aten.triu.default, local=_triangle_local, contiguous=True)
def _triangle(call: OpCall) -> list[Strategy]:
    return kept(call, range(call.operands[0].ndim)) + terms_of(call, LINEAR)


# ---- joining -------------------------------------------------------------------------------------


@rule(aten.cat.default)
def _joined(call: OpCall) -> list[Strategy]:
    (result,) = call.outputs
    assert result is not None
    ndim = len(result.shape)
    nothing = [spec.shape == (0,) and ndim != 1 for spec in call.operands]
    found: list[Strategy] = []
    for d in range(ndim):
        if d != call.arg("dim") % ndim:
            inputs = tuple(R if empty else Shard(d) for empty in nothing)
            found.append(Strategy(inputs, (Shard(d),)))
    dtypes = {spec.meta.dtype for spec in call.operands}
    return found + terms_of(call, TERMS if len(dtypes) == 1 else ())


@rule(aten.stack.default)
def _stacked(call: OpCall) -> list[Strategy]:
    ndim, count = call.operands[0].ndim, len(call.operands)
    new = call.arg("dim") % (ndim + 1)
    found = [Strategy((Shard(d),) * count, (Shard(d + (d >= new)),)) for d in range(ndim)]
    dtypes = {spec.meta.dtype for spec in call.operands}
    return found + terms_of(call, TERMS if len(dtypes) == 1 else ())
