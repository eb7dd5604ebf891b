"""`replicate`: data parallelism in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dure._composable import replicate
from dure._composable.replicate import DDP  # pyright: ignore
from dure.errors import ModuleError, UsageError
from dure.fsdp import fully_shard
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import Net, accumulate, compare
from tests.thread_ranks import on_ranks


def in_place(model: Net) -> None:
    before = list(model.state_dict())
    assert replicate(model, find_unused_parameters=True) is model
    assert list(model.state_dict()) == before
    assert isinstance(model, Net) and isinstance(model, DDP)


def around_sharded_blocks(model: Net) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model, find_unused_parameters=True)


@pytest.mark.parametrize(
    "scenario",
    [
        {"prepare": in_place},
        {"prepare": around_sharded_blocks},
        {"prepare": in_place, "step": accumulate, "expected_step": accumulate},
    ],
    ids=["in place", "around sharded blocks", "accumulation"],
)
def test_training_equals_one_rank(scenario: dict[str, Any]) -> None:
    compare("shared", 3, **scenario)


def test_ignored_modules_keep_their_own_gradients() -> None:
    def body(rank: int) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        replicate(model, ignored_modules=[model[0]], device_id=torch.device("cpu"))
        model(torch.full((1, 2), float(rank))).sum().backward()
        return model[0].weight.grad, model[1].weight.grad

    first, second = run_ranks(2, body)
    assert first[0].tolist() == [[0.0, 0.0]] * 2
    assert second[0].tolist() == [[2.0, 2.0]] * 2
    # The output of the first layer is 1 on rank 0, and 3 on rank 1.
    assert first[1].tolist() == second[1].tolist() == [[2.0, 2.0]] * 2


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    model = replicate(nn.Linear(2, 2))
    with pytest.raises(ModuleError, match="already"):
        replicate(model)
    with pytest.raises(ModuleError, match="already"):
        fully_shard(model)
    with pytest.raises(ModuleError, match="cannot be copied"):
        copy.deepcopy(model)
    sharded = nn.Linear(2, 2)
    fully_shard(sharded)
    with pytest.raises(ModuleError, match="already"):
        replicate(sharded)
    with pytest.raises(UsageError, match="mixed_precision"):
        replicate(nn.Linear(2, 2), mixed_precision=object())
