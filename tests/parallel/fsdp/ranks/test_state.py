"""Forwards and backwards that begin in the middle, are repeated, fail or are interrupted."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dure import fsdp
from dure.device_mesh import init_device_mesh
from dure.errors import ModuleError, UsageError
from dure.fsdp import fully_shard, join_step, strategy
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    batch,
    by_step,
    compare,
    loss_of,
    making,
    mine,
    shard,
    sharded,
    whole,
)
from tests.profiles import names_in, profile_of, steps_of
from tests.thread_ranks import on_ranks

X = torch.tensor([2.0, 4.0])


class Scale(nn.Module):
    """Returns a * x, or raises `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a * x
        if self.error is not None:
            raise self.error
        return y


class Chain(nn.Module):
    """Returns b(a * x), and keeps a * x; if the first part raises a KeyError, b(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = Scale(), nn.Linear(2, 2, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(KeyError):
            x = self.first(x)
        self.feature = x
        return self.inner(x)


def made(way: str, part: str = "inner") -> Any:
    """Return a sharded model; the parameters of the other part are the root's."""
    with making:
        model = Chain()
    with strategy(way):
        fully_shard(getattr(model, part))
        return fully_shard(model)


def check_step(model: Any) -> None:
    model.zero_grad()
    out = model(X)
    assert out.tolist() == [18.0, 38.0]
    out.sum().backward()
    assert whole(model.first.a.grad).tolist() == [8.0, 24.0]
    assert whole(model.inner.weight.grad).tolist() == [[2.0, 8.0]] * 2
    assert model.unused.grad is None


def fail(_: object) -> None:
    raise KeyError("once")


# ---------------------------------------------------------------- backwards


@on_ranks(2)
def test_a_loss_on_a_feature_gives_gradients_and_leaves_nothing(rank: int, way: str) -> None:
    model = made(way)
    for _ in range(2):
        model.zero_grad()
        model(X)
        model.feature.sum().backward()
        assert torch.equal(whole(model.first.a.grad), X)
        assert model.inner.weight.grad is None
        assert model.unused.grad is None
        check_step(model)


WAYS_TO_WRITE = {
    "parameter": lambda p: p.mul_(2),
    "local tensor": lambda p: p.to_local().mul_(2),
    "optimizer": lambda p: torch.optim.SGD([p], lr=1.0).step(),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),  # pyright: ignore
}


@pytest.mark.parametrize("write", WAYS_TO_WRITE)
@on_ranks(2)
def test_a_write_between_forward_and_backward_is_refused(rank: int, way: str, write: str) -> None:
    model = made(way)
    loss = model(X).sum()
    with torch.no_grad():
        model.inner.reshard()
        weight = model.inner.weight
        weight.grad = torch.ones_like(weight)
        WAYS_TO_WRITE[write](weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    model(X).sum().backward()
    assert torch.equal(whole(model.inner.weight.grad), torch.tensor([[2.0, 8.0]] * 2))


@on_ranks(2)
def test_a_write_before_a_backward_through_a_feature_is_refused_and_named(rank: int) -> None:
    """With *shared* the backward is noticed after it has read the weight."""
    model = made("shared")
    model(X)
    with torch.no_grad():
        model.reshard()
        model.first.a.mul_(2)
    with pytest.raises(ModuleError) as error:
        model.feature.sum().backward()
    assert error.value.parameters == ("first.a",)


@on_ranks(2)
def test_a_backward_that_makes_a_graph_of_gradients_is_refused(rank: int, way: str) -> None:
    model = made(way)
    with pytest.raises(ModuleError) as error:
        model(X).square().sum().backward(create_graph=True)
    assert error.value.parameters
    check_step(model)


@on_ranks(2)
def test_after_a_backward_that_raised_another_one_gives_all_gradients(rank: int, way: str) -> None:
    model = made(way)
    out = model(X)
    handle = model.feature.register_hook(fail)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    out.sum().backward()
    assert torch.equal(whole(model.first.a.grad), torch.tensor([8.0, 24.0]))
    assert torch.equal(whole(model.inner.weight.grad), torch.tensor([[2.0, 8.0]] * 2))


@on_ranks(2)
def test_parameters_replaced_between_forward_and_backward_are_named(rank: int, way: str) -> None:
    model = made(way)
    model(X)
    feature = model.feature
    model.double()
    model(X.double())
    with pytest.raises(ModuleError) as error:
        feature.sum().backward()
    assert error.value.parameters == ("first.a",)


# ---------------------------------------------------------------- what was left by an exception


# Torch calls no hooks of a forward that Ctrl-C has left.
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_after_a_forward_that_was_interrupted_a_step_is_right(
    rank: int, way: str, error: type[BaseException], grad: bool
) -> None:
    model = made(way, "first")
    check_step(model)
    model.first.error = error
    with torch.set_grad_enabled(grad), pytest.raises(error):
        model(X)
    model.first.error = None
    check_step(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_after_a_backward_that_raised_zero_grad_and_a_step_are_right(
    rank: int, way: str, error: type[BaseException]
) -> None:
    model = made(way, "first")
    check_step(model)
    out = model(X)

    def interrupt(_: torch.Tensor) -> None:
        raise error

    out.register_hook(interrupt)
    with pytest.raises(error):
        out.sum().backward()
    check_step(model)


@on_ranks(2)
def test_an_error_that_the_forward_around_catches_leaves_its_parameters(
    rank: int, way: str
) -> None:
    model = made(way, "first")
    check_step(model)
    model.first.error = KeyError
    model.zero_grad()
    out = model(X)
    assert out.tolist() == [10.0, 22.0]
    out.sum().backward()
    assert whole(model.inner.weight.grad).tolist() == [[2.0, 4.0]] * 2
    model.first.error = None
    check_step(model)


# ---------------------------------------------------------------- ranks without a batch


def has_batch(rank: int, number: int) -> bool:
    """Rank 1 has a batch in the first step only, rank 2 in the first two."""
    return rank == 0 or number < rank


def alone(model: nn.Module, number: int) -> torch.Tensor:
    """Train on the batches of all ranks: the mean over all ranks, also those without."""
    losses = [
        loss_of(model, mine(batch(number), 3, rank)) / 3
        for rank in range(3)
        if has_batch(rank, number)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss


def until_batches_end(model: nn.Module, number: int, size: int, rank: int) -> torch.Tensor:
    if has_batch(rank, number):
        return by_step(model, number, size, rank)
    join_step(model)
    return torch.zeros((), dtype=torch.double)


def beside_replicas(model: Net) -> None:
    shard(model, mesh=init_device_mesh("cpu", (3, 1)))


@pytest.mark.parametrize(
    "scenario",
    [{}, {"prepare": partial(shard, reshard_after_forward=False)}, {"prepare": beside_replicas}],
    ids=["default", "kept", "replicas"],
)
def test_ranks_run_out_of_batches(way: str, scenario: dict[str, Any]) -> None:
    compare(way, 3, step=until_batches_end, expected_step=alone, **scenario)


@on_ranks(2)
def test_evaluation_without_a_batch(rank: int, way: str) -> None:
    model = sharded(way)
    with pytest.raises(UsageError, match="first step needs a batch"):
        join_step(model)
    by_step(model, 0, 2, rank)
    with torch.no_grad():
        if rank == 0:
            loss_of(model, batch(1))
        else:
            join_step(model)
    by_step(model, 1, 2, rank)
    with pytest.raises(UsageError, match="outermost"):
        join_step(model.blocks[0])


# ---------------------------------------------------------------- records of torch's profiler


# With torch's FSDP2 the names are the same; it gathers the first module in that one's forward.
GATHERED = ["FSDP::all_gather (0)", "FSDP::all_gather (2)"] * 2
REDUCED = ["FSDP::post_backward_reduce (2)", "FSDP::post_backward_reduce (0)"]


@pytest.mark.parametrize("strategy", ["gathered", "shared"])
@on_ranks(2)
def test_gathers_and_reductions_are_recorded_as_in_torch(rank, strategy):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    with fsdp.strategy(strategy):
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    profile = profile_of(rank, steps_of(model))
    if rank == 0:
        names = names_in(profile)
        gathers = [n for n in names if n.startswith("FSDP::all_gather (")]
        # In backward the second layer comes first; with *shared*, ranks see the same memory.
        assert sorted(gathers) == (sorted(GATHERED) if strategy == "gathered" else [])
        assert [n for n in names if n.startswith("FSDP::post_backward_reduce (")] == REDUCED
        for phase in ("root_pre_forward", "pre_forward (2)", "pre_backward (0)"):
            assert names.count(f"FSDP::{phase}") == 1
        assert names.count("c10d::_reduce_scatter_base_") == 2
