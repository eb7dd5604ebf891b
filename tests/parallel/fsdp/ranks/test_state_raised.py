"""Forwards that are left by an exception: later ones work, whatever kind of exception it was."""

# pyright: reportArgumentType=false

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, register_fsdp_forward_method, strategy
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import making, whole

SIZE = 2
X = torch.tensor([2.0, 4.0])
WITHOUT_HOOKS = [KeyboardInterrupt, SystemExit, GeneratorExit]
"""Exceptions after which torch calls no hooks of a forward."""


class Scale(nn.Module):
    """y = a * x, or raises `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a * x
        if self.error is not None:
            raise self.error
        return y


class Net(nn.Module):
    """y = b * a * x; where the first part raises a KeyError, b * x."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale()
        self.b = nn.Parameter(torch.tensor([3.0, 5.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(KeyError):
            x = self.first(x)
        return self.b * x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self.b


def made(way: str) -> Any:
    with making:
        model = Net()
    with strategy(way):
        fully_shard(model.first)
        return fully_shard(model)


def check_step(model: Any) -> None:
    model.zero_grad()
    out = model(X)
    assert out.tolist() == [6.0, 40.0]
    out.sum().backward()
    assert whole(model.b.grad).tolist() == [2.0, 8.0]
    assert whole(model.first.a.grad).tolist() == [6.0, 20.0]


@pytest.mark.parametrize("error", WITHOUT_HOOKS)
@pytest.mark.parametrize("grad", [True, False])
def test_after_a_forward_that_was_interrupted_a_step_is_right(
    way: str, error: type[BaseException], grad: bool
) -> None:
    def body(rank: int) -> None:
        model = made(way)
        check_step(model)
        model.first.error = error
        with torch.set_grad_enabled(grad), pytest.raises(error):
            model(X)
        model.first.error = None
        check_step(model)

    run_ranks(SIZE, body)


def test_after_a_method_that_was_interrupted_a_step_is_right(way: str) -> None:
    def body(rank: int) -> None:
        model = made(way)
        register_fsdp_forward_method(model, "generate")
        model.first.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            model.generate(X)
        model.first.error = None
        check_step(model)
        assert model.generate(X).tolist() == [9.0, 45.0]

    run_ranks(SIZE, body)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_after_a_backward_that_raised_zero_grad_and_a_step_are_right(
    way: str, error: type[BaseException]
) -> None:
    def body(rank: int) -> None:
        model = made(way)
        check_step(model)
        out = model(X)

        def fail(_: torch.Tensor) -> None:
            raise error

        out.register_hook(fail)
        with pytest.raises(error):
            out.sum().backward()
        check_step(model)

    run_ranks(SIZE, body)


def test_an_error_that_the_forward_around_catches_leaves_its_parameters(way: str) -> None:
    def body(rank: int) -> None:
        model = made(way)
        check_step(model)
        model.first.error = KeyError
        model.zero_grad()
        out = model(X)
        assert out.tolist() == [6.0, 20.0]
        out.sum().backward()
        assert whole(model.b.grad).tolist() == [2.0, 4.0]
        model.first.error = None
        check_step(model)

    run_ranks(SIZE, body)


def test_a_forward_within_an_except_block_is_not_taken_for_one_that_raised(way: str) -> None:
    def body(rank: int) -> None:
        with making:
            one, two = Scale(), Scale()
        with strategy(way):
            fully_shard([one, two])
        out = one(X)
        try:
            raise KeyError
        except KeyError:
            out = two(out)
        out.sum().backward()
        assert whole(one.a.grad).tolist() == [2.0, 8.0]
        assert whole(two.a.grad).tolist() == [2.0, 8.0]

    run_ranks(SIZE, body)
