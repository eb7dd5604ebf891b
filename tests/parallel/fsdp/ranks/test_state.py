"""Forwards and backwards that begin in the middle, are repeated, fail or are interrupted."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure import fsdp
from dure.device_mesh import init_device_mesh
from dure.errors import ModuleError, UsageError
from dure.fsdp import fully_shard, join_step, strategy
from dure.tensor import DTensor
from dure.testing import CommRecorder, run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    assert_same,
    batch,
    by_step,
    compare,
    full_gradients,
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
def test_a_loss_on_a_feature_gives_gradients_and_leaves_nothing(rank, way):
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
def test_a_write_between_forward_and_backward_is_refused(rank, way, write):
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
def test_a_write_before_a_backward_through_a_feature_is_refused_and_named(rank):
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
def test_a_backward_that_makes_a_graph_of_gradients_is_refused(rank, way):
    model = made(way)
    with pytest.raises(ModuleError) as error:
        model(X).square().sum().backward(create_graph=True)
    assert error.value.parameters
    check_step(model)


@on_ranks(2)
def test_after_a_backward_that_raised_another_one_gives_all_gradients(rank, way):
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
def test_parameters_replaced_between_forward_and_backward_are_named(rank, way):
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
def test_after_a_forward_that_was_interrupted_a_step_is_right(rank, way, error, grad):
    model = made(way, "first")
    check_step(model)
    model.first.error = error
    with torch.set_grad_enabled(grad), pytest.raises(error):
        model(X)
    model.first.error = None
    check_step(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_after_a_backward_that_raised_zero_grad_and_a_step_are_right(rank, way, error):
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
def test_an_error_that_the_forward_around_catches_leaves_its_parameters(rank, way):
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
def test_ranks_run_out_of_batches(way, scenario):
    compare(way, 3, step=until_batches_end, expected_step=alone, **scenario)


@on_ranks(2)
def test_evaluation_without_a_batch(rank, way):
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


# --------------------------------------------------------------------------------------------------
# A list of modules that are gathered together, of which a step calls some only.


SIZE, WIDTH = 2, 4


class Listed(nn.Module):
    """An embedding, a body, and a norm and a head that are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, words: torch.Tensor, within: bool = False) -> torch.Tensor:
        """With `within`, chunks of a loss run backward before forward has ended."""
        hidden = self.body(self.embed(words))
        for chunk in hidden.detach().split(2) if within else ():
            self.head(chunk).square().sum().backward()
        return self.norm(hidden)


def in_chunks(model: Listed, words: torch.Tensor) -> None:
    """Backward of each chunk's loss frees its logits."""
    hidden = model(words)
    gradients = []
    for chunk in hidden.detach().split(2):
        chunk.requires_grad_()
        model.head(chunk).square().sum().backward()
        gradients.append(chunk.grad)
    hidden.backward(torch.cat(gradients))


def checkpointed_chunks(model: Listed, words: torch.Tensor) -> None:
    hidden = model(words)
    chunks = (checkpoint(model.head, c, use_reentrant=False) for c in hidden.split(2))
    torch.cat(list(chunks)).square().sum().backward()


def chunks_within_forward(model: Listed, words: torch.Tensor) -> None:
    model(words, within=True).square().sum().backward()


def norm_alone(model: Listed, words: torch.Tensor) -> None:
    model(words).square().sum().backward()


def head_alone(model: Listed, words: torch.Tensor) -> None:
    model.head(torch.nn.functional.one_hot(words, 6)[:, :WIDTH].double()).sum().backward()


def looks_between(model: Listed, words: torch.Tensor) -> None:
    """A head that is called without gradients, before the forward and in the middle of a step."""
    with torch.no_grad():
        model.head(torch.ones(1, WIDTH, dtype=torch.double))
    hidden = model(words)
    with torch.no_grad():
        model.head(hidden)
    hidden.square().sum().backward()


def unused_forward(model: Listed, words: torch.Tensor) -> None:
    """With gradients, and no backward."""
    model.head(torch.ones(1, WIDTH, dtype=torch.double))
    in_chunks(model, words)


STEPS = [
    in_chunks,
    checkpointed_chunks,
    chunks_within_forward,
    norm_alone,
    head_alone,
    looks_between,
    unused_forward,
]


def the_last_two(model: Any) -> None:
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def ends(model: Any) -> None:
    fully_shard([model.embed, model.head])
    fully_shard(model)


def as_a_root(model: Any) -> None:
    fully_shard(model.body)
    fully_shard([model.embed, model.norm, model.head])


@pytest.mark.parametrize("shard", [the_last_two, ends, as_a_root], ids=lambda f: f.__name__)
def test_gradients_are_those_of_one_process(way, shard):
    """Each kind of step after each other one; modules have shards when it has ended."""
    with making:
        torch.manual_seed(0)
        made = Listed().double()
    words = [torch.tensor([0, 3, 1, 3]), torch.tensor([5, 2, 2, 4])]

    def body(rank: int) -> None:
        model, alone = copy.deepcopy(made), copy.deepcopy(made)
        with strategy(way):
            shard(model)
        for step in STEPS + STEPS[::-1]:
            model.zero_grad()
            alone.zero_grad()
            step(model, words[rank])
            for each in words:
                step(alone, each)
            for parameter in alone.parameters():
                if parameter.grad is not None:
                    parameter.grad /= SIZE
            assert_same(full_gradients(model), full_gradients(alone))
            assert all(isinstance(p, DTensor) for p in model.parameters())

    run_ranks(SIZE, body)


def test_a_module_of_a_list_called_alone_frees_its_parameters():
    """So that whatever reads or writes parameters between steps has shards."""

    def body(rank: int) -> list[str]:
        with making:
            model: Any = Listed()
        with strategy("gathered"):
            the_last_two(model)
        with torch.no_grad(), CommRecorder() as recorder:
            for _ in range(2):
                model.head(torch.ones(1, WIDTH))
                assert isinstance(model.head.weight, DTensor)
        return recorder.ops

    assert run_ranks(SIZE, body) == [["all_gather_single"] * 2] * 2
