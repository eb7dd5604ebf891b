"""Fully sharded training with real processes: as one rank, and when one is killed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import Desync
from dure.fsdp import fully_shard
from tests.comm.forked_ranks import Ranks
from tests.parallel.fsdp.procs import fsdp_ranks
from tests.parallel.fsdp.ranks.fsdp_models import assert_same, expected_weights


@pytest.mark.parametrize(
    ("backend", "n", "way", "replicas"),
    [
        ("shm", 3, "shared", 1),
        ("shm", 4, "gathered", 2),
        ("gloo", 2, "gathered", 1),
    ],
)
def test_training_equals_one_rank_with_the_same_bits_each_time(
    process_pool, backend, n, way, replicas
):
    pool = process_pool(n, backend)
    first, second = (pool.run(fsdp_ranks.trains, n, way, replicas) for _ in range(2))
    for _, weights in first:
        assert_same(weights, expected_weights())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    ("way", "phase", "note"),
    [
        ("shared", "forward", "are complete"),
        ("shared", "backward", "are complete"),
        ("shared", "step", "incomplete"),
        ("gathered", "backward", ""),
    ],
)
def test_survivors_of_a_death_learn_the_state_of_the_weights(tmp_path, way, phase, note):
    with Ranks(2, tmp_path, fsdp_ranks.loses_one, way, phase) as ranks:
        result = ranks.result(0)
        if isinstance(result, BaseException):
            raise result
        kind, notes = result
        assert ranks.result(1) is None
    assert kind == "PeerLost"
    assert note in " ".join(notes)


# --------------------------------------------------------------------------------------------------
# Models that are made on the meta device, and initialized by ranks that have their own seeds.


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


def test_shards_are_initialized_with_the_seeds_of_their_ranks_2_ranks(process_pool):
    process_pool(2).run(_initialize_shards)


def test_replicas_must_have_one_seed_2_ranks(process_pool):
    process_pool(2).run(_initialize_replicas)
