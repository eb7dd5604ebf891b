"""Matrix products: rows, columns, or the dimension that is summed over; batches.

A product whose inner dimension is sharded gives terms of a sum. A product is linear in each factor,
so terms of one, with the other whole, give terms as well.
"""

from __future__ import annotations

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.rules import rule

aten = torch.ops.aten
R = Replicate()
SUM = Partial("sum")
LINEAR = (SUM, Partial("avg"))


def _products(batch: bool) -> list[tuple[Placement, Placement, Placement]]:
    """Return what is legal for left, right, and their product."""
    b = int(batch)
    found: list[tuple[Placement, Placement, Placement]] = [
        (Shard(b), R, Shard(b)),
        (R, Shard(b + 1), Shard(b + 1)),
        (Shard(b + 1), Shard(b), SUM),
    ]
    if batch:
        found.append((Shard(0), Shard(0), Shard(0)))
    for term in LINEAR:
        found += [(term, R, term), (R, term, term)]
    return found


@rule(aten.mm.default)
def _mm(call: OpCall) -> list[Strategy]:
    return [Strategy((a, b), (c,)) for a, b, c in _products(False)]


@rule(aten.bmm.default)
def _bmm(call: OpCall) -> list[Strategy]:
    return [Strategy((a, b), (c,)) for a, b, c in _products(True)]


@rule(aten.addmm.default, aten.baddbmm.default)
def _addmm(call: OpCall) -> list[Strategy]:
    batch = "baddbmm" in call.name
    bias, ndim = call.operands[0], 2 + batch
    found: list[Strategy] = []
    for a, b, c in _products(batch):
        if isinstance(c, Shard):
            own = c.dim - (ndim - bias.ndim)
            whole = own < 0 or bias.shape[own] == 1
            found.append(Strategy((R if whole else Shard(own), a, b), (c,)))
        else:
            found.append(Strategy((c, a, b), (c,)))
    return found
