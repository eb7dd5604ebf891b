"""The state of an optimizer before its first step."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

import dure
from dure.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from dure.errors import UsageError
from dure.testing import run_ranks

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "fused": (torch.optim.Adam, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_state_before_the_first_step_is_that_of_beginning(name):
    kind, options = KINDS[name]
    torch.manual_seed(0)
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    second.load_state_dict(first.state_dict())
    plain = kind(first.parameters(), lr=0.5, **options)
    taken = kind(second.parameters(), lr=0.5, **options)
    ConstantLR(taken, factor=1.0)  # it replaces step() of the instance
    calls = []
    taken.register_step_pre_hook(lambda *_: calls.append(1))
    before = {k: v.clone() for k, v in second.state_dict().items()}
    state = get_optimizer_state_dict(second, taken)
    assert not calls and all(p.grad is None for p in second.parameters())
    assert all(v.equal(before[k]) for k, v in second.state_dict().items())
    assert name == "Adagrad" or not taken.state
    assert not state["state"] or name != "SGD"
    set_optimizer_state_dict(second, taken, state)
    for _ in range(3):
        for model, optimizer in ((first, plain), (second, taken)):
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(v.equal(first.state_dict()[k]) for k, v in second.state_dict().items())


def test_an_optimizer_that_needs_more_is_refused():
    model = nn.Linear(2, 3)
    with pytest.raises(UsageError, match="LBFGS is not known before it has stepped"):
        get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="the model has not"):
        get_optimizer_state_dict(model, torch.optim.SGD(nn.Linear(2, 3).parameters()))
    both = [torch.optim.SGD(model.parameters()), torch.optim.SGD([model.weight])]
    with pytest.raises(UsageError, match="two optimizers"):
        get_optimizer_state_dict(model, both)

    def body(rank):
        zero = dure.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
        with pytest.raises(UsageError, match="consolidate_state_dict"):
            get_optimizer_state_dict(model, zero, options=StateDictOptions(full_state_dict=True))

    run_ranks(1, body)
