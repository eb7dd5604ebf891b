"""Forwards that are left by an exception: later ones work, whatever kind of exception it was."""

# pyright: reportArgumentType=false

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, register_fsdp_forward_method, strategy
from tests.parallel.fsdp.ranks.fsdp_models import making, whole
from tests.thread_ranks import on_ranks

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
@on_ranks(SIZE)
def test_after_a_forward_that_was_interrupted_a_step_is_right(
    rank: int, way: str, error: type[BaseException], grad: bool
) -> None:
    model = made(way)
    check_step(model)
    model.first.error = error
    with torch.set_grad_enabled(grad), pytest.raises(error):
        model(X)
    model.first.error = None
    check_step(model)


@on_ranks(SIZE)
def test_after_a_method_that_was_interrupted_a_step_is_right(rank: int, way: str) -> None:
    model = made(way)
    register_fsdp_forward_method(model, "generate")
    model.first.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model.generate(X)
    model.first.error = None
    check_step(model)
    assert model.generate(X).tolist() == [9.0, 45.0]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@on_ranks(SIZE)
def test_after_a_backward_that_raised_zero_grad_and_a_step_are_right(
    rank: int, way: str, error: type[BaseException]
) -> None:
    model = made(way)
    check_step(model)
    out = model(X)

    def fail(_: torch.Tensor) -> None:
        raise error

    out.register_hook(fail)
    with pytest.raises(error):
        out.sum().backward()
    check_step(model)


@on_ranks(SIZE)
def test_an_error_that_the_forward_around_catches_leaves_its_parameters(
    rank: int, way: str
) -> None:
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


@on_ranks(SIZE)
def test_a_forward_within_an_except_block_is_not_taken_for_one_that_raised(
    rank: int, way: str
) -> None:
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


class Inner(nn.Module):
    """y = b * a * x, after backwards within forward of which the first raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()
        self.failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def fail(_: torch.Tensor) -> None:
            raise KeyError

        y = self.first(x)
        for _ in range(self.failures):
            hooked = y * 1
            hooked.register_hook(fail)
            with suppress(KeyError):
                self.second(hooked).sum().backward(retain_graph=True)
            y = self.first(x)
        return self.second(y)


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("failures", [1, 2])
@on_ranks(SIZE)
def test_a_backward_in_forward_that_raised_leaves_the_parameters(
    rank: int, way: str, failures: int, frees: bool
) -> None:
    with making:
        model: Any = Inner()
    with strategy(way):
        for part in (model.first, model.second):
            fully_shard(part, reshard_after_forward=frees)
        fully_shard(model)
    for model.failures in (0, failures, 0):
        out = model(X)
        assert out.tolist() == [2.0, 16.0]
        out.sum().backward()
        assert whole(model.first.a.grad).tolist() == [2.0, 8.0]
        assert whole(model.second.a.grad).tolist() == [2.0, 8.0]
        model.zero_grad()


class Writes(Scale):
    """y = a * x; or changes the parameter, and raises `error`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            with torch.no_grad():
                self.a.mul_(1)
            raise self.error
        return self.a * x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("call", ["forward", "generate"])
@on_ranks(SIZE)
def test_a_forward_that_wrote_parameters_and_raised_raises_that(
    rank: int, way: str, call: str, within: bool
) -> None:
    with making:
        part = Writes()
    with strategy(way):
        fully_shard(part)
        model: Any = fully_shard(nn.Sequential(part)) if within else part
    if call == "generate":
        register_fsdp_forward_method(part, "generate")
    run = part.generate if call == "generate" and not within else model
    run(X).sum().backward()
    part.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run(X)
    part.error = None
    part.zero_grad()
    run(X).sum().backward()
    assert whole(part.a.grad).tolist() == [2.0, 4.0]
