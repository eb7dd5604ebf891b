"""The sharded optimizer on thread-ranks, against the unsharded one: not a bit may differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import NotInGroupError, OptimizerError
from dure.testing import run_ranks
from tests.parallel.optim.zero_models import (
    KINDS,
    OPTIMIZERS,
    Net,
    batch,
    equal,
    pair,
    same,
    step,
    train_both,
)
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize(
    ("n", "optimizer", "kind", "grouped"),
    [
        *((3, optimizer, "straight", True) for optimizer in OPTIMIZERS),
        (3, "adamw", "buckets", True),
        (3, "momentum", "shared", True),
        (1, "adamw", "shared", False),
        (2, "adamw", "straight", False),
        (2, "adamw", "buckets", False),
        (12, "adamw", "straight", False),  # more ranks than parameters
    ],
)
def test_steps_and_state_are_those_of_the_unsharded_optimizer(n, optimizer, kind, grouped):
    def body(rank):
        _, ours, _, theirs = train_both(rank, optimizer, kind, grouped)
        ours.consolidate_state_dict(to=n - 1)
        if rank == n - 1:
            return same(ours.state_dict(), theirs.state_dict())
        with pytest.raises(OptimizerError):
            ours.state_dict()
        return True

    assert all(run_ranks(n, body))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_frozen_parameters_and_closures(kind):
    def body(rank):
        def made(model, optimizer, **options):
            model.mid.requires_grad_(False)
            trained = [p for p in model.parameters() if p.requires_grad]
            return model, optimizer(trained, lr=0.01, **options)

        def ours(params, **options):
            return dist.ZeroRedundancyOptimizer(params, torch.optim.Adam, **options)

        both = made(Net(), ours, **KINDS[kind]), made(Net(), torch.optim.Adam)
        data = torch.Generator().manual_seed(2)
        for turn in range(3):
            if turn == 1:  # one is unfrozen and given to the optimizer, another one frozen
                for m, o in both:
                    m.mid.requires_grad_(True)
                    m.up.bias.requires_grad_(False)
                    o.add_param_group({"params": list(m.mid.parameters()), "lr": 0.02})
            x = batch(data)
            losses = []
            for m, o in both:

                def closure(m=m, o=o, x=x):
                    o.zero_grad()
                    loss = m(x).square().mean()
                    loss.backward()
                    return loss

                losses.append(o.step(closure).item())
            assert losses[0] == losses[1]
            dist.barrier()
            assert equal(both[0][0], both[1][0])
        both[0][1].consolidate_state_dict()
        return rank > 0 or same(both[0][1].state_dict(), both[1][1].state_dict())

    assert all(run_ranks(2, body))

    # The step takes 1 from the first one's elements, and from two of them once more.


@on_ranks(2)
def test_bad_parameters_are_refused_by_type(rank):
    leaf = nn.Parameter(torch.zeros(3))
    sparse = torch.eye(3).to_sparse().requires_grad_()
    wrong: Any
    for wrong in (leaf, [leaf * 2], [sparse], ["x"], [], [{"params": [leaf * 2]}], 3):
        with pytest.raises(OptimizerError):
            dist.ZeroRedundancyOptimizer(wrong, torch.optim.SGD, lr=0.1)
    both = {**KINDS["buckets"], **KINDS["shared"]}
    with pytest.raises(OptimizerError):
        dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD, lr=0.1, **both)
    with pytest.raises(OptimizerError):  # an optimizer instead of its class
        dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD([leaf]))  # pyright: ignore[reportArgumentType]
    ours = dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD, lr=0.1)
    with pytest.raises(OptimizerError):
        ours.add_param_group({"params": [leaf]})
    with pytest.raises(OptimizerError):
        copy.deepcopy(ours)
    with pytest.raises(NotInGroupError):
        ours.consolidate_state_dict(to=2)
    with pytest.raises(OptimizerError):
        ours.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_hooks_of_steps_run_once_around_the_update_of_all_ranks(rank, kind):
    model, seen = nn.Linear(2, 2), []
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.5, **KINDS[kind]
    )

    def before(one, args, kwargs):
        assert one is optimizer and (args[1:], kwargs) == ((), {})
        for parameter in model.parameters():
            parameter.grad.mul_(2)

    def after(one, args, kwargs):
        seen.append([p.flatten().tolist() for p in model.parameters()])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == [[[0.0] * 4, [0.0] * 2]]


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
