"""Matrix products: rows, columns, the inner dimension, and batches may be sharded.

If the inner dimension is sharded, the product is Partial, and only the first rank along that axis
adds the bias. A product is linear in each factor: if one is Partial and the other replicated, the
product is Partial, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import SUM, AxisStrategy, OpCall, R, linear_in
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule

aten = torch.ops.aten


def _products(call: OpCall, batch: bool) -> list[tuple[Placement, Placement, Placement]]:
    """Return the valid placements of left, right, and their product."""
    b = int(batch)
    found: list[tuple[Placement, Placement, Placement]] = [
        (Shard(b), R, Shard(b)),
        (R, Shard(b + 1), Shard(b + 1)),
        (Shard(b + 1), Shard(b), SUM),
    ]
    if batch:
        found.append((Shard(0), Shard(0), Shard(0)))
    for term in linear_in(call):
        found += [(term, R, term), (R, term, term)]
    return found


@rule(aten.mm.default, aten.bmm.default)
def _product(call: OpCall) -> list[AxisStrategy]:
    return [AxisStrategy((a, b), (c,)) for a, b, c in _products(call, call.op is aten.bmm.default)]


def _added_once(call: OpCall) -> Callable[..., Any] | None:
    """Add the bias only on the first of the ranks whose terms are summed."""
    bias, left, _ = call.operands
    axes = [
        axis
        for axis, placement in enumerate(left.placements)
        if placement.is_shard(left.ndim - 1) and bias.placements[axis].is_replicate()
    ]
    at, op = bias.coordinate or (0,) * len(bias.placements), call.op
    if not any(at[axis] for axis in axes):
        return None
    return lambda *args, **kwargs: op(*args, **{**kwargs, "beta": 0})


@rule(aten.addmm.default, aten.baddbmm.default, local=_added_once)
def _addmm(call: OpCall) -> list[AxisStrategy]:
    batch = "baddbmm" in call.name
    bias, ndim = call.operands[0], 2 + batch
    found: list[AxisStrategy] = []
    for a, b, c in _products(call, batch):
        if isinstance(c, Shard):
            own = c.dim - (ndim - bias.ndim)
            broadcast = own < 0 or bias.shape[own] == 1
            found.append(AxisStrategy((R if broadcast else Shard(own), a, b), (c,)))
        else:
            found.append(AxisStrategy((c, a, b), (c,)))
            if isinstance(a, Shard):
                found.append(AxisStrategy((R, a, b), (c,)))
    return found
