"""Operators that work along one or some dimensions; the others may be sharded.

Sorting, cumulative sums, flips and shifts, padding, repeating, triangles, joining.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import LINEAR, TERMS, AxisStrategy, OpCall, R, same_placement
from dure.tensor.placement_types import Shard
from dure.tensor.registry import by_value, rule

aten = torch.ops.aten


def _others(call: OpCall) -> list[int]:
    """Return the dimensions other than the argument `dim`."""
    ndim = call.operands[0].ndim
    return [d for d in range(ndim) if d != call.arg("dim") % ndim]


@rule(
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    aten._safe_softmax.default,
)  # fmt: skip
def _along_one(call: OpCall) -> list[AxisStrategy]:
    linear = call.op is aten.cumsum.default and call.operands[0].meta.dtype.is_floating_point
    return same_placement(call, [*map(Shard, _others(call)), *(LINEAR if linear else ())])


@rule(aten.flip.default, aten.roll.default)
def _reordered(call: OpCall) -> list[AxisStrategy]:
    ndim, dims = call.operands[0].ndim, call.arg("dims")
    flat = call.op is aten.roll.default and not dims
    moved = set(range(ndim)) if flat else {d % ndim for d in dims if ndim}
    return same_placement(call, [*(Shard(d) for d in range(ndim) if d not in moved), *TERMS])


@rule(aten.renorm.default)
def _renorm(call: OpCall) -> list[AxisStrategy]:
    return same_placement(call, [Shard(call.arg("dim") % call.operands[0].ndim)])


by_value.add(aten.constant_pad_nd.default)


@rule(aten.constant_pad_nd.default)
def _padded(call: OpCall) -> list[AxisStrategy]:
    ndim, pad = call.operands[0].ndim, call.arg("pad")
    same = [Shard(d) for d in range(ndim) if not any(pad[2 * (ndim - 1 - d) : 2 * (ndim - d)])]
    return same_placement(call, [*same, *(LINEAR if call.arg("value") == 0 else ())])


@rule(aten.repeat.default)
def _repeated(call: OpCall) -> list[AxisStrategy]:
    spec, repeats = call.operands[0], call.arg("repeats")
    added = len(repeats) - spec.ndim
    same = [d for d in range(spec.ndim) if repeats[d + added] == 1]
    cuts = [AxisStrategy((Shard(d),), (Shard(d + added),)) for d in same]
    return cuts + same_placement(call, TERMS)


def _triangle_local(call: OpCall) -> Callable[..., Any]:
    """Shift the diagonal by the offsets of this rank's rows and columns."""
    spec, op = call.operands[0], call.op
    (_, row), (_, column) = spec.runs(spec.ndim - 2)[0], spec.runs(spec.ndim - 1)[0]
    return lambda tensor, diagonal=0: op(tensor, diagonal + row - column)


@rule(aten.tril.default, aten.triu.default, local=_triangle_local, contiguous=True)
def _triangle(call: OpCall) -> list[AxisStrategy]:
    return same_placement(call, [*map(Shard, range(call.operands[0].ndim)), *LINEAR])


# ---- joining -------------------------------------------------------------------------------------


@rule(aten.cat.default)
def _joined(call: OpCall) -> list[AxisStrategy]:
    ndim = len(call.output.shape)
    nothing = [spec.shape == (0,) and ndim != 1 for spec in call.operands]
    found: list[AxisStrategy] = []
    cut = {p.dim for spec in call.operands for p in spec.placements if isinstance(p, Shard)}
    for d in range(ndim):
        if d != call.arg("dim") % ndim and d in cut:  # as in torch; others need an all_to_all
            inputs = tuple(R if empty else Shard(d) for empty in nothing)
            found.append(AxisStrategy(inputs, (Shard(d),)))
    dtypes = {spec.meta.dtype for spec in call.operands}
    return found + same_placement(call, TERMS if len(dtypes) == 1 else ())


@rule(aten.stack.default)
def _stacked(call: OpCall) -> list[AxisStrategy]:
    ndim, count = call.operands[0].ndim, len(call.operands)
    new = call.arg("dim") % (ndim + 1)
    found = [AxisStrategy((Shard(d),) * count, (Shard(d + (d >= new)),)) for d in range(ndim)]
    dtypes = {spec.meta.dtype for spec in call.operands}
    return found + same_placement(call, TERMS if len(dtypes) == 1 else ())
