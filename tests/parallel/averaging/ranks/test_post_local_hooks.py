"""Hooks of the optimizers that average models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.parallel.averaging.averagers import PeriodicModelAverager
from dure.parallel.averaging.diloco import DiLoCo
from dure.parallel.averaging.post_local import PostLocalSGDOptimizer
from dure.testing import run_ranks

KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "post-local SGD": lambda optim: PostLocalSGDOptimizer(optim, PeriodicModelAverager(2)),
    "DiLoCo": lambda optim: DiLoCo(optim, period=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_steps_and_states_run_once_2_ranks(kind: str) -> None:
    def rank_main(rank: int) -> list[str]:
        model, seen = nn.Linear(1, 1), []
        optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {"packed": state})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: state["packed"])
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert list(state) == ["packed"] and "param_groups" in state["packed"]
        optimizer.load_state_dict(state)
        return seen

    expected = ["before step", "after step", "before saving", "after loading"]
    assert run_ranks(2, rank_main) == [expected] * 2
