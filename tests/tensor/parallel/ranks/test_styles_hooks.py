"""Tensor parallelism and the hooks of the program: they see what one process's hooks see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dure.mesh import init_device_mesh
from dure.tensor import DTensor
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.testing import run_ranks


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.arange(float(parameter.numel())) % 5 - 2
                parameter.copy_(values.view(parameter.shape))

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * factor


def whole(tensor: Any) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.flatten().tolist()


Seen = list[tuple[Any, ...]]


def hook_parameters(model: nn.Module, names: tuple[str, ...]) -> Seen:
    """Double each gradient, record it when it is accumulated, and step with it."""
    seen: Seen = []
    for name in names:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda g: g * 2)
        removed = parameter.register_hook(lambda g: g * 1000)

        def record(p: torch.Tensor, name: str = name, removed: Any = removed) -> None:
            seen.append((name, whole(p.grad)))
            torch.optim.SGD([p], lr=1.0).step()
            removed.remove()

        parameter.register_post_accumulate_grad_hook(record)
        removed.remove()
    return seen


def hook_modules(model: nn.Module) -> Seen:
    seen: Seen = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, kwargs, out: out + 1, with_kwargs=True)
        module.register_forward_hook(
            lambda *_, name=name: seen.append(("forward", name)), always_call=True
        )
        module.register_full_backward_pre_hook(lambda _, out: (out[0] * 3,))
        module.register_full_backward_hook(
            lambda _, into, out, name=name: seen.append(("backward", name))
        )
        module.register_full_backward_hook(lambda _, into, out: (into[0] * 2,))
    return seen


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")


def step(model: nn.Module) -> list[list[float]]:
    """Run a backward; return the gradients of the input and of parameters, and their values."""
    x = torch.tensor([[1.0, 2.0, -1.0, 0.0], [0.0, 1.0, 1.0, 3.0]]).requires_grad_()
    model(x, factor=2.0).sum().backward()
    parameters = [model.get_parameter(name) for name in NAMES]
    return [whole(t) for p in parameters for t in (p, p.grad)] + [whole(x.grad)]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_hooks_run_as_in_one_process_whenever_they_were_registered_2_ranks(is_before: bool):
    def run(model: nn.Module, apply: Any) -> tuple[Seen, Seen, list[list[float]]]:
        if not is_before:
            model = apply(model)
        hooks = hook_parameters(model, NAMES), hook_modules(model)
        if is_before:
            model = apply(model)
        results = step(model)
        return sorted(hooks[0]), hooks[1], results

    def rank_main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        plan = {name: style() for name, style in PLAN.items()}
        return run(copy.deepcopy(model), lambda m: parallelize_module(m, mesh, plan))

    model = Perceptron()
    expected = run(copy.deepcopy(model), lambda m: m)
    for found in run_ranks(2, rank_main):
        assert found == expected
