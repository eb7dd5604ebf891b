"""Models that are made on the meta device, and initialized by ranks that have their own seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import Desync
from dure.fsdp import fully_shard
from dure.testing import ProcessPool


def _made(seed: int, replicas: int = 1) -> nn.Linear:
    mesh = dist.init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("copies", "shards")
    )
    with torch.device("meta"):
        layer = nn.Linear(6, 5)
    fully_shard(layer, mesh=mesh if replicas > 1 else mesh["shards"])
    layer.to_empty(device="cpu")
    torch.manual_seed(seed)
    layer.reset_parameters()
    return layer


def _rows(layer: nn.Linear) -> torch.Tensor:
    return layer.weight.to_local().detach()  # pyright: ignore


def _alone(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return nn.Linear(6, 5).weight.detach()


def _initialize_shards(rank: int) -> None:
    """Each rank gets its rows of what it would draw alone."""
    assert torch.equal(_rows(_made(3 + rank)), _alone(3 + rank)[[slice(0, 3), slice(3, 5)][rank]])
    assert torch.equal(_rows(_made(3)), _alone(3)[[slice(0, 3), slice(3, 5)][rank]])


def _initialize_replicas(rank: int) -> None:
    """Shards may have seeds of their own, replicas not."""
    with pytest.raises(Desync, match="copies"):
        _made(rank, replicas=2)
    _made(3, replicas=2)


def test_shards_are_initialized_with_the_seeds_of_their_ranks_2_ranks(
    process_pool: Callable[..., ProcessPool],
):
    process_pool(2).run(_initialize_shards)


def test_replicas_must_have_one_seed_2_ranks(process_pool: Callable[..., ProcessPool]):
    process_pool(2).run(_initialize_replicas)
