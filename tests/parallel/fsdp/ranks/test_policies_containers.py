"""Containers: dicts that refuse `update` are cast; what a block writes reaches its caller."""

# pyright: reportArgumentType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import dure as dist
from dure.fsdp import MixedPrecisionPolicy, fully_shard, strategy
from dure.training.precision import MixedPrecision
from tests.parallel.fsdp.ranks.fsdp_models import making, whole
from tests.thread_ranks import on_ranks

LOW, HIGH = torch.float32, torch.float64


class Output(OrderedDict[str, Any]):
    """Items are attributes as well; as transformers' `ModelOutput`, it refuses `update`."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("not to be updated")


class Net(nn.Module):
    """Takes and returns an `Output`; y = w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=HIGH))

    def forward(self, given: Output) -> Output:
        assert given.x.dtype == given["x"].dtype == LOW
        out = Output()
        out["y"] = self.w * given.x
        return out


def shard(way: str) -> Callable[[nn.Module], Any]:
    def wrap(net: nn.Module) -> Any:
        with strategy(way):
            return fully_shard(net, mp_policy=MixedPrecisionPolicy(LOW, output_dtype=HIGH))

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "gathered": shard("gathered"),
    "shared": shard("shared"),
    "ddp": lambda net: dist.DistributedDataParallel(
        net, mixed_precision=MixedPrecision(param_dtype=LOW)
    ),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(2)
def test_a_dict_that_refuses_update_is_cast_on_its_way_in_and_out(rank: int, kind: str) -> None:
    with making:
        net = Net()
    model = WRAPPERS[kind](net)
    given = Output()
    given["x"] = torch.tensor([3.0, 5.0], dtype=HIGH, requires_grad=True)
    out = model(given)
    assert type(out) is Output
    assert out.y.dtype == out["y"].dtype == (LOW if kind == "ddp" else HIGH)
    out.y.sum().backward()
    assert whole(net.w.grad).tolist() == [3.0, 5.0]
    assert given.x.grad is not None
    assert given.x.grad.tolist() == [1.0, 2.0]


@dataclass
class Cache:
    keys: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Caching(nn.Module):
    """y = w * x, which is appended to a cache and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor, cache: Cache, losses: list[torch.Tensor]) -> torch.Tensor:
        y = self.w * x
        cache.keys.append(y.detach())
        cache.calls += 1
        losses.append(y.sum())
        return y


@on_ranks(2)
def test_what_a_block_writes_into_a_container_reaches_its_caller(rank: int, way: str) -> None:
    with making:
        net = Caching()
    with strategy(way):
        model: Any = fully_shard(net)
    cache, losses = Cache(), []
    model(torch.tensor([3.0, 5.0], requires_grad=True), cache, losses)
    assert [key.tolist() for key in cache.keys] == [[3.0, 10.0]]
    assert cache.calls == 1
    losses[0].backward()
    assert whole(net.w.grad).tolist() == [3.0, 5.0]
