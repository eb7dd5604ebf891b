"""How the sharded optimizer brings new values to all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import OptimizerError
from dure.testing import CommRecorder, run_ranks
from tests.parallel.optim.zero_models import KINDS, Net, batch, equal, pair, step
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


def test_parameters_frozen_at_first_are_trained_once_they_may():
    def frozen(model):
        model.up.requires_grad_(False)
        return model.parameters()

    def body(rank):
        model, ours, other, theirs = pair(
            lambda m: dist.ZeroRedundancyOptimizer(frozen(m), torch.optim.SGD, lr=0.1),
            lambda m: torch.optim.SGD(frozen(m), lr=0.1),
        )
        data = torch.Generator().manual_seed(3)
        for trained in (False, True):
            x = batch(data)
            for m in (model, other):
                m.up.requires_grad_(trained)
            assert step(model, ours, x) == step(other, theirs, x)
        return equal(model, other)

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_frozen_parameter_with_a_gradient_is_updated_as_torch_does_2_ranks(rank, kind):
    params = [nn.Parameter(torch.ones(3), requires_grad=i == 0) for i in range(3)]
    zero = dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5, **KINDS[kind])
    for p in params:
        p.grad = torch.ones_like(p)
    dist.barrier()
    zero.step()
    assert [p.tolist() for p in params] == [[0.5] * 3] * 3


@on_ranks(2)
def test_a_parameter_may_get_gaps_after_the_plan_2_ranks(rank):
    params = [nn.Parameter(torch.ones(200, 200)) for _ in range(2)]
    zero = dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5)
    for p in params:
        p.data = torch.ones(200, 400)[:, ::2]
        p.grad = torch.ones_like(p)
    zero.step()
    assert [bool((p == 0.5).all()) for p in params] == [True, True]


@on_ranks(2)
def test_views_of_each_other_do_not_go_into_buckets_2_ranks(rank):
    base = torch.arange(6.0)
    params = [nn.Parameter(base[:4]), nn.Parameter(base[2:])]
    with pytest.raises(OptimizerError):
        dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, **KINDS["buckets"])
