"""Matrix products: rows, columns, or the dimension that is summed over; batches.

A product whose inner dimension is sharded gives terms of a sum; what is added to it is added by the
first rank of that axis only. A product is linear in each factor,
so terms of one, with the other whole, give terms as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import SUM, OpCall, R, Strategy, linear_in
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule

aten = torch.ops.aten


def _products(call: OpCall, batch: bool) -> list[tuple[Placement, Placement, Placement]]:
    """Return what is legal for left, right, and their product."""
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
def _product(call: OpCall) -> list[Strategy]:
    return [Strategy((a, b), (c,)) for a, b, c in _products(call, call.op is aten.bmm.default)]


def _added_once(call: OpCall) -> Callable[..., Any] | None:
    """Let only the first of the ranks that have terms of the product add the bias."""
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
def _addmm(call: OpCall) -> list[Strategy]:
    batch = "baddbmm" in call.name
    bias, ndim = call.operands[0], 2 + batch
    found: list[Strategy] = []
    for a, b, c in _products(call, batch):
        if isinstance(c, Shard):
            own = c.dim - (ndim - bias.ndim)
            whole = own < 0 or bias.shape[own] == 1
            found.append(Strategy((R if whole else Shard(own), a, b), (c,)))
        else:
            found.append(Strategy((c, a, b), (c,)))
            if isinstance(a, Shard):
                found.append(Strategy((R, a, b), (c,)))
    return found
