"""Forwards and backwards that Ctrl-C or `SystemExit` leaves: the next step is right."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.parallel.ddp.replicate import replicate
from dure.testing import run_ranks
from dure.training.precision import MixedPrecision


class Net(nn.Module):
    """y = a * x, or raises `error`; counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.zeros(1))
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.error is not None:
            raise self.error
        return self.a * x


WRAPPERS: dict[str, Callable[[Net], Any]] = {
    "plain": dist.DistributedDataParallel,
    "unused": lambda net: dist.DistributedDataParallel(net, find_unused_parameters=True),
    "precision": lambda net: dist.DistributedDataParallel(
        net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "replicate": replicate,
}


def check_step(model: Any, net: Net, rank: int) -> None:
    model.zero_grad()
    model(torch.tensor([2.0, 4.0]) * (1 + 2 * rank)).sum().backward()
    assert net.a.grad.tolist() == [4.0, 8.0]  # the average of 1 and 3 times


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_after_an_interrupt_a_step_is_right(kind: str, error: type[BaseException]) -> None:
    def body(rank: int) -> None:
        net = Net()
        model = WRAPPERS[kind](net)
        check_step(model, net, rank)
        net.error = error
        with pytest.raises(error):
            model(torch.ones(2))
        net.error = None
        check_step(model, net, rank)

        def interrupt(_: torch.Tensor) -> None:
            raise error

        out = model(torch.ones(2))
        out.register_hook(interrupt)
        with pytest.raises(error):
            out.sum().backward()
        check_step(model, net, rank)

    run_ranks(2, body)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_no_sync_ends_when_it_is_left_by_an_interrupt(error: type[BaseException]) -> None:
    def body(rank: int) -> None:
        net = Net()
        model = dist.DistributedDataParallel(net)
        net.error = error
        with pytest.raises(error), model.no_sync():
            model(torch.ones(2))
        net.error = None
        check_step(model, net, rank)

    run_ranks(2, body)


class Skips(nn.Module):
    """y = a * x, or x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        return x * 1 if skip else self.a * x


def test_a_replicated_module_that_is_called_in_an_except_block_sees_its_backward() -> None:
    """As a forward that is tried again with less, after it ran out of memory."""

    def body(rank: int) -> None:
        net: Any = replicate(Skips(), find_unused_parameters=True)
        try:
            raise MemoryError
        except MemoryError:
            out = net(torch.tensor([2.0, 4.0], requires_grad=True), rank == 1)
        out.sum().backward()
        assert net.a.grad.tolist() == [1.0, 2.0]  # half of rank 0's: rank 1 has none

    run_ranks(2, body)
