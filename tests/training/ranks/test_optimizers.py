"""Optimizers of a sharded model: made before it was sharded, or of shards that were replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import OptimizerError
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    BOTH_WAYS,
    assert_same,
    by_parts,
    filled,
    full_weights,
)

pytestmark = BOTH_WAYS


def made() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def sharded(model: nn.Sequential, way: str) -> nn.Sequential:
    return by_parts(way, model, model[0])


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(0, 1, 6).view(2, 3)).square().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def adamw(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    return torch.optim.AdamW(groups, lr=0.3)


@pytest.mark.parametrize("is_made_first", [True, False])
def test_an_optimizer_trains_the_shards_whose_parameters_it_has_got(way, is_made_first):
    """Made before sharding; or of shards that `load_state_dict(assign=True)` replaces."""
    reference = made()
    alone = adamw(reference)
    for _ in range(3):
        step(reference, alone)

    def body(rank: int) -> Any:
        model = made()
        optimizer = adamw(model if is_made_first else sharded(model, way))
        if is_made_first:
            sharded(model, way)
        for _ in range(3):
            step(model, optimizer)
            if not is_made_first:
                values = {name: t.clone() for name, t in model.state_dict().items()}
                model.load_state_dict(values, assign=True)
        if is_made_first:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
        return full_weights(model)

    for found in run_ranks(2, body):
        assert_same(found, full_weights(reference))


def test_an_optimizer_with_state_from_before_sharding_is_refused(way):
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
