"""Models that are made without memory, sharded, and given memory and values afterwards."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    assert_same,
    by_step,
    expected_gradients,
    full_gradients,
    full_weights,
    made,
    sharded,
)
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


def on_meta(way: str, **options: Any) -> Any:
    with torch.device("meta"):
        model = Net(**options).double()
    return sharded(way, model)


def test_modules_reset_their_parameters(way: str) -> None:
    """Each rank draws its rows of one full tensor: bounds of the layers hold, ranks differ."""

    def body(rank: int) -> Any:
        model = on_meta(way)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(99.0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        full = full_weights(model)
        by_step(model, 0, 2, rank)
        return full

    first, second = run_ranks(2, body)
    assert_same(first, second)
    assert not any((value == 99.0).any() for value in first.values())
    weight = first["blocks.0.up.weight"]
    assert weight.abs().max() <= 1 / 6**0.5
    assert not torch.equal(weight[0], weight[4])
    assert torch.equal(first["blocks.0.norm.weight"], torch.ones(6).double())


@on_ranks(2)
def test_a_model_is_sharded_and_trained_within_a_block_of_another_device(
    rank: int, way: str
) -> None:
    """The block gives the model its device; Dure's own tensors stay on the CPU."""

    with torch.device("meta"):
        model = sharded(way, Net().double())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(torch.tensor([[rank, 2], [3, 4]], device="cpu")).sum().backward()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 1]
        total = dist.clip_grad_norm_(model.parameters(), 1.0)
    assert total.device.type == "cpu" and total > 0


def test_weights_assigned_before_an_unshard_are_kept(way: str) -> None:
    """A program may look at its parameters after loading, before the first step."""

    def body(rank: int) -> Any:
        model = on_meta(way)
        full = {name: value.clone() for name, value in made().double().state_dict().items()}
        shards = model.state_dict()
        for name, value in full.items():
            like = shards[name]
            shards[name] = distribute_tensor(value, like.device_mesh, like.placements)
        model.load_state_dict(shards, assign=True)
        dist.barrier()
        model.unshard()
        assert model.embed.weight.device.type == "cpu"
        model.reshard()
        dist.barrier()
        assert_same(full_weights(model), full)
        by_step(model, 0, 2, rank)
        return full_gradients(model)

    for rank, gradients in enumerate(run_ranks(2, body)):
        assert gradients, rank


@pytest.mark.parametrize("is_begun", [False, True])
@on_ranks(2)
def test_weights_assigned_while_unsharded_are_kept(rank: int, way: str, is_begun: bool) -> None:
    """Within the module that was sharded, which does not notice it; or while it is gathered."""

    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    with strategy(way):
        fully_shard(model)
    mesh = model[0].weight.device_mesh
    values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
    handle = model.unshard(async_op=True)
    if not is_begun:
        handle.wait()
    model[0].load_state_dict({"weight": values}, assign=True)
    handle.wait()
    model.reshard()
    assert model[0].weight.full_tensor().tolist() == [[5, 5], [5, 5]]
    assert model(torch.ones(1, 2)).tolist() == [[10, 10]]


@on_ranks(2)
def test_tied_parameters_stay_tied(rank: int, way: str) -> None:
    model = on_meta(way, tied=True)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    by_step(model, 0, 2, rank)
    assert model.head.weight is model.embed.weight


def test_values_come_from_full_tensors_or_a_state_dictionary(way: str) -> None:
    def body(rank: int, assigned: bool) -> Any:
        model = on_meta(way)
        if assigned:
            model.load_state_dict(sharded(way).state_dict(), assign=True)
        else:
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), made().parameters(), strict=True):
                    full = DTensor.from_local(values, parameter.device_mesh, [Replicate()])
                    parameter.copy_(full)
        by_step(model, 0, 2, rank)
        return full_gradients(model)

    for assigned in (False, True):
        for found in run_ranks(2, body, assigned):
            assert_same(found, expected_gradients())


@on_ranks(2)
def test_a_frozen_layer_without_memory(rank: int, way: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    with strategy(way):
        fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    out = model(torch.ones(1, 3))
    out.sum().backward()
    assert out.tolist() == [[13.0] * 3]
    assert model[0].weight.grad is None


@on_ranks(2)
def test_one_of_the_parameters_of_a_group_is_assigned(rank: int, way: str) -> None:
    model: Any = nn.Linear(2, 2)
    nn.init.ones_(model.bias)
    with strategy(way):
        fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    mesh = model.weight.device_mesh
    values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
    model.load_state_dict({"weight": values}, strict=False, assign=True)
    assert model(torch.ones(1, 2)).tolist() == [[11, 11]]  # leaves it unsharded
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    out = model(torch.ones(1, 2))
    assert out.tolist() == [[3, 3]]
    out.sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("place", [0, 1])
@on_ranks(2)
def test_a_tied_weight_assigned_while_unsharded_is_in_all_its_places(
    rank: int, way: str, place: int
) -> None:
    model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    with strategy(way):
        fully_shard(model)
    mesh = model[0].weight.device_mesh
    values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
    model.unshard()
    model[place].load_state_dict({"weight": values}, assign=True)
    model.reshard()
    assert model[0].weight is model[1].weight
    assert model[1].weight.full_tensor().tolist() == [[5, 5], [5, 5]]
    assert model(torch.ones(1, 2)).tolist() == [[100, 100]]


@on_ranks(2)
def test_what_is_no_shard_is_dropped_by_reshard(rank: int, way: str) -> None:
    """As weights that a program merges for an evaluation."""

    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.ones_(model[0].weight)
    with strategy(way):
        fully_shard(model)
    shard = model[0].weight
    with torch.no_grad():
        model.unshard()
        model[0].weight = nn.Parameter(model[0].weight + 1)
        assert model[0](torch.ones(1, 2)).tolist() == [[4, 4]]
        model.reshard()
        assert model[0].weight is shard
        assert model(torch.ones(1, 2)).tolist() == [[2, 2]]


def test_weights_assigned_while_they_are_gathered_are_awaited(way: str) -> None:
    """On all ranks: the last one puts its rows in place when the first one waits already."""
    waits = threading.Event()

    def body(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
        nn.init.zeros_(model[0].weight)
        with strategy(way):
            fully_shard(model)
        mesh = model[0].weight.device_mesh
        values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
        handle = model.unshard(async_op=True)
        model.load_state_dict({"0.weight": values}, assign=True)
        if rank == 0:
            waits.set()
        else:
            assert waits.wait(PATIENCE_S)
            time.sleep(0.1)
        handle.wait()
        assert model[0].weight.tolist() == [[5, 5], [5, 5]]
        model.reshard()

    run_ranks(2, body)
