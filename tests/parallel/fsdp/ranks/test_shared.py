"""Strategy *shared*: no rank reads while another writes; models have their own turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import by_parts, making
from tests.thread_ranks import on_ranks

WRITES = 25


class Slow(torch.autograd.Function):
    """Looks at a tensor after a while, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, look: Callable[..., None]) -> Any:
        ctx.seen, ctx.look = seen, look
        look(seen)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.look(ctx.seen)
        return gradients[0], None, None


class Looking(nn.Module):
    def __init__(self, look: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))
        self.inner = nn.Linear(3, 3)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(self.inner(x) @ self.weight.t(), self.weight.detach(), self.look)


def looking(rank: int, expected: list[float]) -> Callable[[torch.Tensor], None]:
    delays = random.Random(rank)

    def look(seen: torch.Tensor) -> None:
        for _ in range(2):
            assert set(seen.flatten().tolist()) == {expected[0]}
            time.sleep(delays.choice([0, 0.001, 0.004]))

    return look


def frozen(model: Looking) -> Looking:
    """Nothing is reduced, so that no rank waits for a reduction."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(("size", "evaluating"), [(2, False), (3, False), (3, True)])
def test_writes_between_steps_are_not_seen_by_the_step_before(size: int, evaluating: bool) -> None:
    def body(rank: int) -> None:
        expected = [0.0]
        model = frozen(Looking(looking(rank, expected)))
        by_parts("shared", model, model.inner)
        for step in range(1, WRITES):
            with torch.set_grad_enabled(not evaluating):
                out = model(torch.ones(2, 3, requires_grad=True))
            if not evaluating:
                out.sum().backward()
            with torch.no_grad():
                model.weight.fill_(float(step)).clamp_(0, WRITES)
            expected[0] = float(step)

    run_ranks(size, body)


WRITTEN = {  # written while module 1 runs -> the parameter that the error names
    "unsharded": "1.0.weight",
    "shard": "0.weight",
    "local tensor": "0.weight",
    "in backward": "0.weight",
}


@pytest.mark.parametrize("kind", WRITTEN)
@on_ranks(2)
def test_writing_in_a_step_is_refused_and_named(rank: int, kind: str) -> None:
    """Through the unsharded parameter of a module, or a shard that the program has kept."""

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    by_parts("shared", model, model[1][0])
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    shard, inner = model[0].weight, model[1][0]

    def write(*_: object) -> None:
        tensors = {"unsharded": inner.weight, "local tensor": shard.to_local()}
        with torch.no_grad():
            tensors.get(kind, shard).mul_(2)

    if kind == "in backward":
        handle = inner.register_full_backward_hook(write)
    else:
        handle = inner.register_forward_pre_hook(write)
    with pytest.raises(ModuleError) as error:
        model(x).sum().backward()
    assert error.value.parameters == (WRITTEN[kind],)
    handle.remove()
    write()  # between steps
    model(x).sum().backward()


# ---------------------------------------------------------------- a model within another


WIDTH = 4


class Outer(nn.Module):
    """Looks at its weight before and after another model has run."""

    def __init__(self, other: nn.Module, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, WIDTH))
        self.delays = random.Random(rank)
        self.others = [other]  # not a module within
        self.expected = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            assert set(self.weight.flatten().tolist()) == {self.expected}
            self.others[0](x)
            time.sleep(self.delays.choice([0, 0.002, 0.004]))
        assert set(self.weight.flatten().tolist()) == {self.expected}
        return x @ self.weight.t()


@on_ranks(2)
def test_the_end_of_a_model_within_anothers_forward_is_not_the_others_end(rank: int) -> None:
    """Ranks that are done with the outer model's forward write it; slower ones still read it."""

    with making:
        inner = nn.Linear(WIDTH, WIDTH)
    outer = Outer(inner, rank)
    by_parts("shared", outer, inner)
    for step in range(1, 12):
        with torch.no_grad():
            outer(torch.ones(1, WIDTH))
            outer.weight.fill_(float(step))
        outer.expected = float(step)
