"""What a step of the sharded optimizer sends, and to where."""

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import OptimizerError
from dure.testing import CommRecorder
from tests.parallel.optim.zero_models import KINDS, Net, batch, step
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("straight", ["all_gather"] * 2),  # one large parameter, and all others packed
        ("buckets", ["all_gather"]),
        ("shared", ["all_reduce", "barrier"]),  # of 4 bytes and of none
    ],
)
@on_ranks(2)
def test_a_step_communicates_once_or_twice_2_ranks(rank, kind, expected):
    model = Net()
    ours = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **KINDS[kind])
    step(model, ours, batch(torch.Generator()))
    with CommRecorder() as seen:
        step(model, ours, batch(torch.Generator()))
    dist.barrier()
    assert seen.ops == expected


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_an_older_graph_notices_that_another_rank_has_changed_a_parameter_2_ranks(rank, kind):
    weight = nn.Parameter(torch.ones(300, 300))  # too large to be packed
    ours = dist.ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1, **KINDS[kind])
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError):
        loss.backward()
    dist.barrier()


@on_ranks(2)
def test_views_of_each_other_do_not_go_into_buckets_2_ranks(rank):
    base = torch.arange(6.0)
    params = [nn.Parameter(base[:4]), nn.Parameter(base[2:])]
    with pytest.raises(OptimizerError):
        dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, **KINDS["buckets"])
