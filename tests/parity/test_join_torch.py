"""DDP's `join` against torch's own on gloo, step for step, in two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import dure as dist
from dure.testing import ProcessPool


class Net(nn.Module):
    """Layers with running statistics, and one that is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.out, self.rare = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        y = self.out(self.inner(x))
        return self.rare(y) if rare else y


def train(ddp: Any, rank: int, counts: tuple[int, ...], by_all: bool) -> list[torch.Tensor]:
    """Train with `join`; return parameters and buffers after each step, and in the end."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=generator)
            ddp(x, step % 2 == 1).pow(2).mean().backward()
            optimizer.step()
            seen += [t.detach().clone() for t in ddp.state_dict().values()]
    return seen + [t.detach().clone() for t in ddp.state_dict().values()]


def both(rank: int, folder: str, counts: tuple[int, ...], by_all: bool) -> int:
    """Train with both; return how many tensors differ in any bit."""
    torch.manual_seed(7)
    model = Net()
    store = torch_dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        f"{folder}/{counts}{by_all}", 2
    )
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        theirs = train(
            nn.parallel.DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True),
            rank,
            counts,
            by_all,
        )
    finally:
        torch_dist.destroy_process_group()
    ddp = dist.DistributedDataParallel(model, find_unused_parameters=True)
    ours = train(ddp, rank, counts, by_all)
    return sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("counts", [(6, 3), (1, 4)])
def test_join_equals_torchs_step_for_step_2_ranks(
    process_pool: Callable[..., ProcessPool], tmp_path: Path, counts: tuple[int, ...], by_all: bool
) -> None:
    # Sums of two, and halves: not a bit may differ.
    assert process_pool(2).run(both, str(tmp_path), counts, by_all) == [0, 0]
