"""The state of a sharded optimizer: where it lives, saved and loaded."""

import copy

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks
from tests.parallel.optim.zero_models import (
    KINDS,
    OPTIMIZERS,
    batch,
    equal,
    groups_of,
    pair,
    same,
    step,
    train_both,
)
from tests.thread_ranks import on_ranks


def test_state_lives_once():
    def body(rank):
        _, ours, _, theirs = train_both(rank, "adamw", "straight")
        parts = ours.local_state_dict()["state"]
        size = sum(e["exp_avg"].numel() for e in parts.values())
        return list(parts), size, sum(e["exp_avg"].numel() for e in theirs.state.values())

    results = run_ranks(3, body)
    assert sorted(number for numbers, _, _ in results for number in numbers) == list(range(9))
    assert sum(size for _, size, _ in results) == results[0][2]


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_another_world_size_and_of_no_sharding_is_loaded(kind):
    def save(rank):
        model, ours, _, _ = train_both(rank, "adamw", "straight")
        ours.consolidate_state_dict()
        return copy.deepcopy((model.state_dict(), ours.state_dict())) if rank == 0 else None

    def load(rank, saved):
        values, state = copy.deepcopy(saved)  # loading takes the tensors as they are
        cls, options = OPTIMIZERS["adamw"]
        model, ours, other, theirs = pair(
            lambda m: dist.ZeroRedundancyOptimizer(groups_of(m), cls, **KINDS[kind], **options),
            lambda m: cls(groups_of(m), **options),
        )
        model.load_state_dict(values)
        dist.barrier()
        ours.load_state_dict(state)
        other.load_state_dict(values)
        theirs.load_state_dict(copy.deepcopy(state))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < options["lr"]
        data = torch.Generator().manual_seed(5)
        for _ in range(2):
            x = batch(data)
            assert step(model, ours, x) == step(other, theirs, x)
        ours.consolidate_state_dict()
        dist.barrier()
        return equal(model, other) and (rank > 0 or same(ours.state_dict(), theirs.state_dict()))

    saved = run_ranks(2, save)[0]
    assert saved is not None
    assert all(run_ranks(3, load, saved))
    assert None not in saved[1]["state"].values()  # loading leaves the state as it was


def three_parameters():
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    for p in params:
        p.grad = p.detach().clone()
    return params


@on_ranks(2)
def test_hooks_of_the_state_run_once_it_is_asked_for(rank):
    zero, seen = dist.ZeroRedundancyOptimizer(three_parameters(), torch.optim.SGD, momentum=0.9), []
    zero.step()
    zero.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state["state"])))
    zero.consolidate_state_dict(0)
    assert seen == []
    if rank == 0:
        zero.state_dict()
        assert seen == [[0, 1, 2]]
