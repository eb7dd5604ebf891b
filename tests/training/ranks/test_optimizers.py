"""Optimizers of a sharded model: made before it was sharded, or of shards that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import OptimizerError
from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import BOTH_WAYS, assert_same, filled, full_weights

pytestmark = BOTH_WAYS


def made() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def sharded(model: nn.Sequential, way: str) -> nn.Sequential:
    with strategy(way):
        fully_shard(model[0])
        return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(0, 1, 6).view(2, 3)).square().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def adamw(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    return torch.optim.AdamW(groups, lr=0.3)


def compare(
    train: Callable[[nn.Sequential], object], expected: Callable[[nn.Sequential], object]
) -> None:
    """Compare the weights of two ranks after `train` with those of one after `expected`."""

    def body(rank: int) -> Any:
        model = made()
        train(model)
        return full_weights(model)

    reference = made()
    expected(reference)
    for found in run_ranks(2, body):
        assert_same(found, full_weights(reference))


@pytest.mark.parametrize("steps", [1, 3])
def test_an_optimizer_made_before_sharding_trains(way: str, steps: int) -> None:
    def alone(model: nn.Sequential) -> None:
        optimizer = adamw(model)
        for _ in range(steps):
            step(model, optimizer)

    def train(model: nn.Sequential) -> None:
        optimizer = adamw(model)
        sharded(model, way)
        for _ in range(steps):
            step(model, optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())

    compare(train, alone)


def test_an_optimizer_of_shards_that_were_replaced_keeps_its_state(way: str) -> None:
    """`load_state_dict(assign=True)` between steps."""

    def train(model: nn.Sequential) -> None:
        sharded(model, way)
        optimizer = adamw(model)
        for _ in range(3):
            step(model, optimizer)
            values = {name: t.clone() for name, t in model.state_dict().items()}
            model.load_state_dict(values, assign=True)

    def alone(model: nn.Sequential) -> None:
        optimizer = adamw(model)
        for _ in range(3):
            step(model, optimizer)

    compare(train, alone)


def test_an_optimizer_with_state_from_before_sharding_is_refused(way: str) -> None:
    def body(rank: int) -> None:
        model = made()
        optimizer = adamw(model)
        step(model, optimizer)
        sharded(model, way)
        with pytest.raises(OptimizerError) as error:
            step(model, optimizer)
        assert error.value.op == "AdamW.step"
        assert "0.weight [4, 3]" in error.value.seen

    run_ranks(2, body)
