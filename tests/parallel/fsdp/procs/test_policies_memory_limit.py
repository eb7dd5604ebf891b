"""Training a model whose parameters and optimizer state are twice the memory there is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.fsdp import OffloadPolicy, fully_shard, strategy
from tests.comm.forked_ranks import Ranks, Slot
from tests.launch.procs.cgroups import MemoryLimit, limited

pytestmark = pytest.mark.needs("engine")

WIDTH, LAYERS = 1024, 24
PARAMETER_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = 3 * LAYERS * PARAMETER_BYTES  # weights and two averages, 302 MB
LIMIT = STATE_BYTES // 2


def _layer(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return model(torch.randn(4, WIDTH, generator=generator)).square().mean()


def _train_model(model: nn.Module) -> list[float]:
    """Make a step; return its loss, and the loss that the new weights give."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = _loss(model, 0)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return [float(loss.detach()), float(_loss(model, 1))]


def _train(slot: Slot, way: str, limit: MemoryLimit, folder: str | None) -> list[float]:
    dist.init_process_group("shm", init_method=slot.url, rank=slot.rank, world_size=slot.size)
    limit.join()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with strategy(way):
        for layer in model:
            fully_shard(layer, offload_policy=OffloadPolicy(path=folder))
        fully_shard(model)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        sharded: Any = parameter
        sharded.part.copy_(_layer(number).chunk(slot.size)[slot.rank])
    losses = _train_model(model)
    dist.barrier()
    return losses


@functools.cache
def _expected() -> list[float]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_layer(number))
    return _train_model(model)


@pytest.mark.parametrize("way", ["shared", "gathered"])
def test_training_in_half_the_memory_2_ranks(tmp_path: Path, way: str) -> None:
    with limited(LIMIT) as limit:
        if isinstance(limit, str):
            pytest.skip(f"needs control groups: {limit}")
        with Ranks(2, tmp_path, _train, way, limit, str(tmp_path)) as ranks:
            results = ranks.values()
        assert limit.highest() <= LIMIT
    for losses in results:
        assert losses == pytest.approx(_expected(), rel=1e-4)
