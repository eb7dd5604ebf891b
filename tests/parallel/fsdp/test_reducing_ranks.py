"""What a rank does for a sharded model does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard
from dure.mesh import DeviceMesh
from dure.tensor import Shard
from tests.work_counts import kept_bytes, num_calls, num_operators, one_rank_of

LAYERS = 20


class Block(nn.Module):
    """Rows: cut evenly by 16 ranks and by 256, unevenly by both, and fewer than 256."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven = nn.Linear(8, 512), nn.Linear(512, 300)
        self.few = nn.Linear(300, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.uneven(self.even(x)))


def _step(mesh: DeviceMesh, dim: int) -> Callable[[], None]:
    """Return a step of a sharded block; biases are cut in their only dimension."""
    block = Block()
    fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)))
    rows = torch.ones(2, 8)

    def step() -> None:
        block(rows).sum().backward()
        block.zero_grad()

    step()
    return step


@pytest.mark.parametrize("dim", [0, 1])
def test_a_step_of_256_ranks_takes_the_operators_of_a_step_of_16(dim: int) -> None:
    counts: dict[int, tuple[int, int]] = {}
    for ranks in (16, 256):
        with one_rank_of(ranks) as mesh:
            step = _step(mesh, dim)
            counts[ranks] = num_operators(step), num_calls(step)
    # 300 rows are cut unevenly by 16 ranks: one more copy in and out than by 256, of two rows each.
    assert counts[256][0] <= counts[16][0]
    assert counts[256][1] <= counts[16][1]


def test_sharding_keeps_no_table_of_all_ranks_per_parameter() -> None:
    def shard(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    kept: dict[int, int] = {}
    calls: dict[int, int] = {}
    for ranks in (16, 256):
        with one_rank_of(ranks) as mesh:
            shard(mesh)
            kept[ranks] = kept_bytes(lambda m=mesh: shard(m))
            calls[ranks] = num_calls(lambda m=mesh: shard(m))
    # A list of 256 numbers per parameter would be 2,048 bytes each.
    assert kept[256] - kept[16] < LAYERS * 6 * 256
    assert calls[256] < calls[16] * 1.05
