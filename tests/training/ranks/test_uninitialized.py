"""Memory that was never written is listed when a sharded model first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import BOTH_WAYS, by_parts
from tests.thread_ranks import on_ranks

pytestmark = BOTH_WAYS


class Rotary(nn.Module):
    """Its buffer is in no state dictionary; flags and an empty parameter are beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("flags", torch.ones(2, dtype=torch.bool))

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)
        self.angles = torch.arange(3.0)
        self.steps.copy_(torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.angles[1]


def on_meta(way: str) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), Rotary())
    by_parts(way, model, model[0])
    model.to_empty(device="cpu")
    return model


@on_ranks(2)
def test_unwritten_memory_is_listed_at_the_first_forward(rank: int, way: str) -> None:
    model = on_meta(way)
    model[0].reset_parameters()
    with pytest.raises(ModuleError) as error:
        model(torch.ones(2, 3))
    assert error.value.parameters == ("1.angles", "1.steps", "1.weight")
    model[1].weight.data.fill_(1.0)
    model[1].steps.copy_(torch.arange(3))
    with pytest.raises(ModuleError) as error:
        model(torch.ones(2, 3))
    assert error.value.parameters == ("1.angles",)


def test_parameters_without_memory_are_listed_at_the_first_forward(way: str) -> None:
    def body(rank: int) -> tuple[str, ...]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2))
        by_parts(way, model, model[0])
        model[2].to_empty(device="cpu")
        model[2].reset_parameters()
        with pytest.raises(ModuleError) as error:
            model(torch.ones(2, 3))
        return error.value.parameters

    wanted = ("0.bias", "0.weight", "1.weight")
    assert [(*sorted(names),) for names in run_ranks(2, body)] == [wanted] * 2


@on_ranks(2)
def test_memory_is_not_listed_however_it_was_written(rank: int, way: str) -> None:
    """In place, through `data`, as a new tensor, from a state dictionary."""

    model = on_meta(way)
    model[1].reset_parameters()
    with torch.no_grad():
        model[0].weight.to_local().fill_(0.5)
    model[0].load_state_dict({"bias": model[0].bias.clone().fill_(0.0)}, strict=False)
    out = model(torch.ones(2, 3))
    assert torch.equal(out, torch.full((2, 2), 1.5 * 4 * 2))
    model.to_empty(device="cpu")  # nothing was on the meta device
    model(torch.ones(2, 3))
