"""DTensors over processes: values of the first rank, random values, a training run."""

# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    rand,
)


def distributes(rank: int) -> None:
    grid = init_device_mesh("cpu", (2, 2))
    for size in (5, 1, 0, 8):
        whole = torch.arange(size * 3.0).reshape(size, 3)
        for placements in (
            [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate()] * 2
        ):  # fmt: skip
            made = distribute_tensor(whole + 100 * rank, grid, placements)
            assert torch.equal(made.full_tensor(), whole), (size, placements)
    torch.manual_seed(5)
    drawn = rand(5, 3, device_mesh=grid, placements=[Shard(0), Shard(1)])
    torch.manual_seed(5)
    assert torch.equal(drawn.full_tensor(), torch.rand(5, 3))


def trains(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))

    def cut(name: str, module: nn.Module, mesh: object) -> None:
        if name == "0":
            module.weight = distribute_tensor(module.weight, mesh, [Shard(0)])

    distribute_module(model, mesh, cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = distribute_tensor(torch.linspace(-1, 1, 15).reshape(5, 3), mesh, [Shard(0)])
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def unsharded() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x, losses = torch.linspace(-1, 1, 15).reshape(5, 3), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_dtensors_over_processes(process_pool, backend):
    pool = process_pool(4, backend)
    pool.run(distributes)
    for losses in pool.run(trains):
        assert losses == pytest.approx(unsharded(), rel=1e-5)
