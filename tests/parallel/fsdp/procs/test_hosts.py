"""Fully sharded training over hosts, which are only pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.fsdp import MixedPrecisionPolicy, fully_shard, join_step, strategy
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


def _unsharded_first(rank: int) -> list[float]:
    """Return the weights that a rank has whole before any forward."""
    model = _sharded(nn.Linear(1, 6, bias=False))
    with torch.no_grad():
        model[0].weight.part.fill_(rank)
    model.unshard()
    return model[0].weight.flatten().tolist()


def test_parameters_may_be_unsharded_before_the_first_forward(pool):
    """Six rows of four ranks."""
    assert pool.run(_unsharded_first) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 4


def _writes_seen(rank: int) -> list[float]:
    """Rows are written between steps, by one rank of one host; all see it in the next forward."""
    model = _sharded(nn.Linear(2, 7, bias=False))
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(1.0)
        seen = [float(model(torch.ones(1, 2)).sum())]
        if rank == 3:  # the last row
            weight.part.fill_(3.0)
        seen.append(float(model(torch.ones(1, 2)).sum()))
    return seen


def test_all_hosts_see_what_a_rank_writes(pool):
    assert pool.run(_writes_seen) == [[14.0, 18.0]] * 4


def _several_forwards(rank: int) -> None:
    """Two forwards, an evaluation, then backward: nothing was written, nothing is refused."""
    model = _sharded(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]
        with torch.no_grad():
            model(torch.ones(1, 4))
        sum(losses).backward()  # pyright: ignore
        optimizer.step()
    loss = model(torch.ones(1, 4)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_refuses_weights_that_another_step_wrote_and_no_others(pool):
    pool.run(_several_forwards)


def _low(rank: int) -> tuple[float, ...]:
    """Unsharded bfloat16 values travel as such; a rank without a batch joins."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = _sharded(nn.Linear(4, 4, bias=False), mp_policy=policy)
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(0.5)
    model(torch.ones(1, 4)).sum().backward()
    with CommRecorder() as seen:
        if rank == 2:
            join_step(model)
        else:
            model(torch.ones(1, 4)).sum().backward()
    sent = [e.nbytes for e in seen.events if e.op == "all_gather_single"]
    return float(weight.grad.part.sum()), *sent


def test_low_precision_and_a_rank_without_a_batch(pool):
    """The first step's average is 1 for each weight, the second's 3/4."""
    assert pool.run(_low) == [(4 * 1.75, 4 * 2)] * 4


def _refused(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        _sharded(nn.Linear(4, 4))
    return error.value.seen


def test_hosts_with_different_numbers_of_ranks_are_gathered():
    with ProcessPool(4, None, hosts="abca") as pool:
        assert all("hosts have 2, 1, 1 ranks" in seen for seen in pool.run(_refused))
        for _, weights in pool.run(fsdp_ranks.trains, 4, "gathered"):
            assert_same(weights, expected_weights())
