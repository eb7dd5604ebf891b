"""The sharded optimizer's state: where it lives, how it is saved, and who can load it."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

import dure as dist
from dure.checkpoint import Checkpointer
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


class Counting(torch.optim.SGD):
    """Keeps a number beside the parameters' state, and lists in it."""

    def step(self, closure=None):  # pyright: ignore
        kept = cast(Any, self.state)
        kept["steps"] = kept.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            kept[p] = {"seen": [p.grad.clone()]}


@pytest.mark.parametrize("sharded", [False, True])
def test_state_beside_the_parameters_is_saved_too_2_ranks(tmp_path, sharded):
    def body(rank):
        params = three_parameters()
        zero, other = (dist.ZeroRedundancyOptimizer(params, Counting) for _ in range(2))
        zero.step()
        checkpoints = Checkpointer(tmp_path, sharded=sharded)
        checkpoints.save(1, zero=zero)
        checkpoints.load(zero=other)
        other.consolidate_state_dict(1)
        return other.state_dict()["state"] if rank == 1 else {}

    _, state = run_ranks(2, body)
    assert state.pop("steps") == 1
    assert [state[i]["seen"][0].tolist() for i in state] == [[0, 0], [1, 1], [2, 2]]


def test_state_is_found_by_the_names_of_its_groups_2_ranks():
    def body(rank):
        params = three_parameters()
        full = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        full.step()
        saved = full.state_dict()
        (group,) = saved["param_groups"]
        state = {f"w{i}": entry for i, entry in saved["state"].items()}
        zero = dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        named = {**group, "params": [f"w{i}" for i in group["params"]]}
        zero.load_state_dict({"state": state, "param_groups": [named]})
        zero.consolidate_state_dict(0)
        found = zero.state_dict()["state"].values() if rank == 0 else ()
        return [entry["momentum_buffer"].tolist() for entry in found]

    assert run_ranks(2, body)[0] == [[0, 0], [1, 1], [2, 2]]


def test_hooks_of_the_state_get_it_whole_and_run_once():
    def body(rank):
        model, ours = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)]), []
        for layer in model:
            nn.init.ones_(layer.weight)  # pyright: ignore
        optimizer = dist.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda _: ours.append("before"))

        def doubled(_, state):
            ours.append(sorted(state["state"]))
            for entry in state["state"].values():
                entry["momentum_buffer"] = entry["momentum_buffer"] * 2
            return {"packed": state}

        def halved(_, packed):
            state = packed["packed"]
            ours.append(sorted(state["state"]))
            for entry in state["state"].values():
                entry["momentum_buffer"] = entry["momentum_buffer"] / 2
            return state

        optimizer.register_state_dict_post_hook(doubled)
        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.register_load_state_dict_post_hook(lambda _: ours.append("after"))
        grads = [p.grad.clone() for p in model.parameters()]
        for to in range(2):
            optimizer.consolidate_state_dict(to)
        assert ours == []
        states: list[Any] = [None]
        if rank == 1:
            states = [optimizer.state_dict()]
            assert ours == ["before", [0, 1, 2]]
            buffers = [states[0]["packed"]["state"][i]["momentum_buffer"] for i in range(3)]
            assert all(torch.equal(b, g * 2) for b, g in zip(buffers, grads, strict=True))
        dist.broadcast_object_list(states, 1)
        ours.clear()
        optimizer.load_state_dict(states[0])
        assert ours == [[0, 1, 2], "after"]
        kept = optimizer.local_state_dict()["packed"]["state"]
        assert all(torch.equal(e["momentum_buffer"], grads[i] * 2) for i, e in kept.items())
        return sorted(kept)

    assert sorted(n for found in run_ranks(2, body) for n in found) == [0, 1, 2]
