"""Full weights: all for a moment, or one by one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError, ShapeError
from dure.fsdp import MixedPrecisionPolicy, full_parameters, fully_shard, strategy, stream_full
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import filled
from tests.thread_ranks import on_ranks


class Net(nn.Module):
    """Tied weights, a plain parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.second(self.first(x)))) * self.scale


def made() -> Net:
    return filled(Net())


def sharded(way: str, **options: Any) -> Net:
    model = made()
    with strategy(way):
        fully_shard(model.first, **options)
        return fully_shard(model, ignored_params={model.scale}, **options)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in stream_full(model)}


@pytest.mark.parametrize(("size", "low"), [(1, False), (2, True), (3, False)])
def test_full_parameters_for_a_moment(way: str, size: int, low: bool) -> None:
    """In the shards' dtype, also where modules compute in another."""
    policy = MixedPrecisionPolicy(torch.bfloat16) if low else MixedPrecisionPolicy()

    def body(rank: int) -> None:
        model = sharded(way, mp_policy=policy)
        shards = dict(model.named_parameters())
        with full_parameters(model):
            got = dict(model.named_parameters())
            assert not any(isinstance(p, DTensor) for p in got.values())
            assert model.tied.weight is model.second.weight
            assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in got.values())
            torch.testing.assert_close(got, dict(made().named_parameters()), rtol=0, atol=0)
            model.first.weight.data.fill_(9.0)
        assert all(p is shards[name] for name, p in model.named_parameters())
        torch.testing.assert_close(full(model), made().state_dict(), rtol=0, atol=0)

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_changes_are_written_back_if_asked(way: str, size: int) -> None:
    """In place and by assignment; each rank once: doubling is doubling."""

    def body(rank: int) -> None:
        model = sharded(way)
        if size > 1:  # a forward that no backward follows: others may still read
            model(torch.ones(1, 5))
        with full_parameters(model, writeback=True), torch.no_grad():
            model.first.weight.mul_(2)
            model.first.bias = nn.Parameter(torch.full((5,), 7.0))
        expected = made().state_dict()
        expected["first.weight"] = expected["first.weight"] * 2
        expected["first.bias"] = torch.full((5,), 7.0)
        torch.testing.assert_close(full(model), expected, rtol=0, atol=0)
        model(torch.ones(1, 5)).sum().backward()

    run_ranks(size, body)


@on_ranks(2)
def test_changes_are_not_written_back_after_an_error(rank: int, way: str) -> None:
    model = sharded(way)
    with pytest.raises(AttributeError), full_parameters(model, writeback=True):
        model.first.weight.data.fill_(9.0).no_such_method()  # pyright: ignore
    with pytest.raises(ModuleError), full_parameters(model):
        model(torch.ones(1, 5))
    with pytest.raises(ShapeError) as error, full_parameters(model, writeback=True):
        model.first.bias = nn.Parameter(torch.ones(6))
    assert "first.bias" in error.value.seen or "bias is [5]" in error.value.seen
    torch.testing.assert_close(full(model), made().state_dict(), rtol=0, atol=0)
    model(torch.ones(1, 5)).sum().backward()


@on_ranks(2)
def test_full_tensors_come_one_by_one(rank: int, way: str) -> None:
    """Sharded and plain, under the names of the state dictionary; one in memory at a time."""

    model = sharded(way)
    expected = made().state_dict()
    before: list[weakref.ref[torch.Tensor]] = []
    names = []
    for name, tensor in stream_full(model, dtype=torch.float64):
        assert not any(ref() is not None for ref in before)
        if name not in ("scale", "steps"):
            before.append(weakref.ref(tensor))
        assert not isinstance(tensor, DTensor)
        wanted = expected[name]
        torch.testing.assert_close(
            tensor, wanted.double() if wanted.is_floating_point() else wanted
        )
        names.append(name)
        del tensor
    assert names == list(expected)
