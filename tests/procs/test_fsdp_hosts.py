"""Fully sharded training over hosts, which are only pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.fsdp import MixedPrecisionPolicy, fully_shard, join_step, strategy
from dure.native import available as native_available
from dure.testing import CommRecorder, ProcessPool
from procs import fsdp_ranks

pytestmark = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(4, None, hosts="aabb") as pool:
        yield pool


@pytest.mark.parametrize("way", ["shared", "gathered"])
def test_training_equals_one_rank_2_hosts_of_2_ranks(pool, way):
    for _, far in pool.run(fsdp_ranks.trains_as_one, 4, way):
        assert far < 1e-12


def test_two_runs_give_the_same_bits(pool):
    first, second = (pool.run(fsdp_ranks.trains_as_one, 4, "shared") for _ in range(2))
    assert first == second


def test_replicas_on_hosts(pool):
    """Each host has a replica: shards are within it."""
    for _, far in pool.run(fsdp_ranks.trains_as_one, 4, "shared", 2):
        assert far < 1e-12


def _gathers(rank: int) -> list[tuple[str, int, int]]:
    """Return what a step gathers: between how many ranks, how many bytes of this rank's."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with strategy("shared"):
        fully_shard(model[0])
        fully_shard(model)
    for _ in range(2):
        with CommRecorder() as seen:
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return [(e.op, e.world_size, e.nbytes) for e in seen.events if e.op == "all_gather_single"]


def test_a_host_gathers_what_it_lacks_once_a_step(pool):
    """Two of eight rows a rank, and a number of 8 bytes; nothing in backward."""
    assert pool.run(_gathers) == [[("all_gather_single", 2, 2 * 8 * 4 + 8)] * 2] * 4


def _writes_seen(rank: int) -> list[float]:
    """Rows are written between steps, by one rank of one host; all see it in the next forward."""
    model = nn.Linear(2, 7, bias=False)
    with strategy("shared"):
        fully_shard(model)
    weight: Any = model.weight
    with torch.no_grad():
        weight.fill_(1.0)
        seen = [float(model(torch.ones(1, 2)).sum())]
        if rank == 3:  # the last row
            weight.part.fill_(3.0)
        seen.append(float(model(torch.ones(1, 2)).sum()))
    return seen


def test_what_a_rank_writes_all_hosts_see(pool):
    assert pool.run(_writes_seen) == [[14.0, 18.0]] * 4


def _several_forwards(rank: int) -> bool:
    """Two forwards, an evaluation, then backward: nothing was written, nothing is refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with strategy("shared"):
        fully_shard(model[0])
        fully_shard(model)
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
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def test_autograd_refuses_weights_that_another_step_wrote_and_no_others(pool):
    assert pool.run(_several_forwards) == [True] * 4


def _low(rank: int) -> tuple[float, ...]:
    """bfloat16 wholes travel as such; a rank without a batch joins."""
    model = nn.Linear(4, 4, bias=False)
    with strategy("shared"):
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with torch.no_grad():
        model.weight.fill_(0.5)
    model(torch.ones(1, 4)).sum().backward()
    with CommRecorder() as seen:
        if rank == 2:
            join_step(model)
        else:
            model(torch.ones(1, 4)).sum().backward()
    gradient: Any = model.weight.grad
    sent = [e.nbytes for e in seen.events if e.op == "all_gather_single"]
    return float(gradient.part.sum()), *sent


def test_low_precision_and_a_rank_without_a_batch(pool):
    """The first step's average is 1 for each weight, the second's 3/4."""
    assert pool.run(_low) == [(4 * 1.75, 4 * 2 + 8)] * 4


def _refused(rank: int) -> str:
    with strategy("shared"):
        try:
            fully_shard(nn.Linear(4, 4))
        except UsageError as error:
            return str(error)
    return ""


def test_hosts_that_differ_are_gathered_as_before():
    with ProcessPool(4, None, hosts="abca") as pool:
        assert all("hosts have 2, 1, 1 ranks" in text for text in pool.run(_refused))
        for _, far in pool.run(fsdp_ranks.trains_as_one, 4, "gathered"):
            assert far < 1e-12
