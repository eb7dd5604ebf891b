"""A module whose gradient is pending over tensor-parallel ranks: bfloat16 cannot add its terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dure.tensor import DTensor, Replicate, Shard, distribute_tensor

SMALL = 2.0**-10
"""1 + SMALL is 1 in bfloat16, and exact in float32."""


class Scale(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def rows(mesh: Any) -> torch.Tensor:
    """Return an input of `Scale` on the axis "tp" of two: a row of 1, and a row of SMALL."""
    row = torch.full((1, 2), SMALL if mesh.get_local_rank("tp") else 1.0)
    return DTensor.from_local(row, mesh["tp"], [Shard(0)])


def backward(model: Any, x: torch.Tensor) -> None:
    """Leave a gradient of 1 + SMALL, a term on each rank of the axis."""
    model(x).to_local(grad_placements=[Shard(0)]).sum().backward()
