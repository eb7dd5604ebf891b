"""Fully sharded training over hosts, which are only pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.fsdp import fully_shard, strategy
from dure.testing import CommRecorder, ProcessPool
from tests.parallel.fsdp.procs import fsdp_ranks
from tests.parallel.fsdp.ranks.fsdp_models import assert_same, expected_weights

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(4, None, hosts="aabb") as pool:
        yield pool


@pytest.mark.parametrize(("way", "replicas"), [("shared", 1), ("gathered", 1), ("shared", 2)])
def test_training_equals_one_rank_with_the_same_bits_each_time(pool, way, replicas):
    """Two hosts of two ranks; with replicas each host has one, and shards are within it."""
    first, second = (pool.run(fsdp_ranks.trains, 4, way, replicas) for _ in range(2))
    for _, weights in first:
        assert_same(weights, expected_weights())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def _sharded(*layers: nn.Module, **options: Any) -> Any:
    model = nn.Sequential(*layers)
    with strategy("shared"):
        for layer in layers[:-1]:
            fully_shard(layer, **options)
        return fully_shard(model, **options)


def _gathers(rank: int) -> list[tuple[int, int]]:
    """Return what a step gathers: between how many ranks, how many bytes of this rank's."""
    model = _sharded(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for _ in range(2):
        with CommRecorder() as seen:
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return [(e.world_size, e.nbytes) for e in seen.events if e.op == "all_gather_single"]


def test_a_host_gathers_what_it_lacks_once_per_step(pool):
    """Two of eight rows per rank; nothing in backward."""
    assert pool.run(_gathers) == [[(2, 2 * 8 * 4)] * 2] * 4


def _writes_seen(rank: int, gradients: bool) -> list[float]:
    """Rows are written between steps, by one rank of one host; all see it in the next forward.

    After a forward with gradients and without a backward, the weight is left unsharded.
    """
    model = _sharded(nn.Linear(2, 7, bias=False))
    weight = model[0].weight
    optimizer = torch.optim.SGD([weight], lr=1.0)  # waits until no rank reads
    with torch.no_grad():
        weight.fill_(1.0)
    seen: list[float] = []
    for _ in range(2):
        with torch.set_grad_enabled(gradients):
            seen.append(model(torch.ones(1, 2)).sum().item())
        weight.grad = torch.full_like(weight, -2.0 if rank == 3 else 0.0)  # has the last row
        optimizer.step()
    return seen


@pytest.mark.parametrize("gradients", [False, True])
def test_all_hosts_see_what_a_rank_writes(pool, gradients):
    assert pool.run(_writes_seen, gradients) == [[14.0, 18.0]] * 4


def _rows_seen(rank: int) -> list[float]:
    """Each rank fills its rows with its number, from 1 on; return what a forward sees of all."""
    model = _sharded(nn.Linear(1, 11, bias=False))
    with torch.no_grad():
        model[0].weight.to_local().fill_(float(rank + 1))
        return model(torch.ones(1, 1))[0].tolist()


def test_a_host_in_the_middle_copies_rows_of_hosts_before_and_after_it():
    """Two rows per rank, and one of the last: it is on the last host, which a rank copies it to."""
    with ProcessPool(6, None, hosts="aabbcc") as pool:
        rows = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0]
        assert pool.run(_rows_seen) == [rows] * 6


def _refused(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        _sharded(nn.Linear(4, 4))
    return error.value.seen


def test_hosts_with_different_numbers_of_ranks_are_gathered():
    with ProcessPool(4, None, hosts="abca") as pool:
        assert all("hosts have 2, 1, 1 ranks" in seen for seen in pool.run(_refused))
        for _, weights in pool.run(fsdp_ranks.trains, 4, "gathered"):
            assert_same(weights, expected_weights())
