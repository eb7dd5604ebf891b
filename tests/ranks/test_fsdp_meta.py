"""Models that are made without memory, sharded, and given memory and values afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks
from ranks.fsdp_models import Net, by_step, made, shard


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def test_modules_reset_their_parameters(way: str) -> None:
    """Each rank draws its rows of one whole: bounds of the layers hold, ranks differ."""

    def body(rank: int) -> Any:
        with torch.device("meta"):
            model = Net().double()
        with strategy(way):
            shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(99.0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # pyright: ignore
        full = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            full[name] = parameter.full_tensor().detach()
        by_step(model, 0, 2, rank)
        return full

    first, second = run_ranks(2, body)
    bound = 1 / 6**0.5
    for name in first:
        assert torch.equal(first[name], second[name])
        assert not (first[name] == 99.0).any(), name
    weight = first["blocks.0.up.weight"]
    assert weight.abs().max() <= bound
    assert not torch.equal(weight[0], weight[4])
    assert torch.equal(first["blocks.0.norm.weight"], torch.ones(6).double())


def test_tied_parameters_stay_tied(way: str) -> None:
    def body(rank: int) -> None:
        with torch.device("meta"):
            model = Net(tied=True).double()
        with strategy(way):
            shard(model)
        model.to_empty(device="cpu")
        assert model.head.weight is model.embed.weight
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        by_step(model, 0, 2, rank)
        assert model.head.weight is model.embed.weight

    run_ranks(2, body)


def test_values_of_a_state_dictionary_are_assigned(way: str) -> None:
    reference = made()
    by_step(reference, 0)

    def body(rank: int) -> None:
        source = made()
        with torch.device("meta"):
            model = Net().double()
        with strategy(way):
            shard(source)
            shard(model)
        model.load_state_dict(source.state_dict(), assign=True)
        by_step(model, 0, 2, rank)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            if expected.grad is not None:
                gradient: Any = parameter.grad
                torch.testing.assert_close(gradient.full_tensor(), expected.grad)

    run_ranks(2, body)


def test_a_frozen_layer_without_memory(way: str) -> None:
    def body(rank: int) -> None:
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

    run_ranks(2, body)
