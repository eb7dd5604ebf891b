"""What autograd reports of a backward, and when."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dure.training.autograd_hooks import (
    at_end_or_failure,
    fills_gradients,
    in_backward,
    on_gradients,
    on_outputs,
)


class Owner:
    """Writes down which gradients have come."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def take(self, number: int) -> None:
        self.numbers.append(number)


def test_gradients_come_under_their_parameters_numbers():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    owner = Owner()
    remove = on_gradients(owner, Owner.take, [a, b])
    b.sum().backward()
    (a * 2).sum().backward()
    assert owner.numbers == [1, 0]
    remove()
    b.sum().backward()
    assert owner.numbers == [1, 0]


def test_hooks_neither_keep_their_owner_nor_outlive_it():
    a = nn.Parameter(torch.ones(1))
    owner = Owner()
    on_gradients(owner, Owner.take, [a])
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert not a._post_accumulate_grad_hooks  # pyright: ignore
    a.sum().backward()


def test_outputs_in_a_pytree_say_that_a_backward_runs():
    a = nn.Parameter(torch.ones(1))
    seen: list[tuple[bool, int]] = []
    outputs = {"loss": [a * 2], "none": torch.ones(1)}
    on_outputs(outputs, lambda nodes: seen.append((in_backward(), len(nodes))))
    outputs["loss"][0].sum().backward()
    assert seen == [(True, 1)]
    assert not in_backward()


@pytest.mark.parametrize("kind", ["backward", "of the input", "of the parameter", "unreached"])
def test_only_a_backward_fills_gradients(kind: str):
    x = torch.ones(1, requires_grad=True)
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    probe = torch.autograd.graph.get_gradient_edge(unused if kind == "unreached" else used).node
    answers: list[bool] = []
    out = x * used
    on_outputs(out, lambda nodes: answers.append(fills_gradients(probe, nodes)))
    if kind in ("backward", "unreached"):
        out.sum().backward()
    else:
        torch.autograd.grad(out.sum(), x if kind == "of the input" else used)
    assert answers == [kind in ("backward", "unreached")]


class Fails(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ValueError("this backward fails")


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_backward_is_reported_also_if_it_raised(fails: bool):
    a = nn.Parameter(torch.ones(1))
    ended: list[bool] = []
    out = (Fails.apply(a) if fails else a * 1) * 2
    on_outputs(out, lambda _: at_end_or_failure(lambda: ended.append(a.grad is not None)))
    if fails:
        with pytest.raises(ValueError, match="this backward fails"):
            out.sum().backward()
    else:
        out.sum().backward()
    assert ended
    assert ended[0] is not fails
