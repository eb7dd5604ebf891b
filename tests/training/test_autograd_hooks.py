"""What autograd reports of a backward, and when."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from dure.training.autograd_hooks import fills_gradients, on_gradients, on_outputs


class Owner:
    """Writes down which gradients have come."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def take(self, number: int) -> None:
        self.numbers.append(number)


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
