"""A backward in two halves and the hooks of the program: gradients are those of one backward."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dure.parallel.pipeline.backward import edges_of, input_backward


class Hooked(nn.Module):
    """Two layers with activations between them, of which the first has hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hook_hidden(hidden)
        return self.second(torch.tanh(hidden * self.scale))


def hook_hidden(hidden: torch.Tensor) -> None:
    hidden.register_hook(lambda g: g * 2)
    hidden.register_hook(lambda g: g + 1)
    assert hidden.grad_fn is not None
    hidden.grad_fn.register_prehook(lambda arrived: (arrived[0] * 3,))


def hook_modules(model: Hooked) -> None:
    for module in (model, model.first, model.second):
        module.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))
        module.register_full_backward_hook(lambda _, into, out: (into[0] * 3,))


def hook_weights(model: Hooked) -> list[str]:
    ran: list[str] = []
    for name, weight in model.named_parameters():
        weight.register_hook(lambda g: g * 5)
        weight.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    return ran


@pytest.mark.parametrize("has_modules_hooked", [False, True])
def test_hooks_change_each_gradient_once(has_modules_hooked: bool):
    model = Hooked()
    if has_modules_hooked:
        hook_modules(model)
    alone = copy.deepcopy(model)
    ran, ran_alone = hook_weights(model), hook_weights(alone)
    for number in range(3):
        x = torch.linspace(-1, 1, 6).view(2, 3) + number
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, rest = input_backward(edges_of([model(ours)]), [torch.ones(2, 3)], [ours])
        rest()
        alone(theirs).backward(torch.ones(2, 3))
        assert found[0] is not None and torch.equal(found[0], theirs.grad)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert sorted(ran) == sorted(ran_alone)
