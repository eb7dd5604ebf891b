"""A forward with gradients, and no backward, leaves the root's parameters unsharded."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError, UsageError
from dure.fsdp import fully_shard, strategy
from dure.parallel.fsdp.state import state_of
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import filled, whole
from tests.thread_ranks import on_ranks

SIZE = 2
X = torch.ones(1, 2)


def made(way: str) -> Any:
    """Return a model whose root has the weight [[-1, -1/3], [1/3, 1]]."""
    model: Any = filled(nn.Sequential(nn.Linear(2, 2, bias=False)))
    with strategy(way):
        return fully_shard(model)


def averages(target: Any, source: Any) -> None:
    """As an average of weights over steps is kept."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, 0.5)


@on_ranks(SIZE)
def test_an_average_of_weights_names_the_way_out(rank: int, way: str) -> None:
    average, model = made(way), made(way)
    expected = 0.5 * whole(model[0].weight)
    with torch.no_grad():
        average[0].weight.zero_()
    average(X)
    with torch.no_grad(), pytest.raises(UsageError, match=r"reshard\(\).*no_grad"):
        averages(average, model)
    average.reshard()
    with torch.no_grad():
        averages(average, model)
    assert torch.equal(whole(average[0].weight), expected)


def test_unsharded_parameters_can_be_saved_and_go_with_their_model(way: str) -> None:
    def body(rank: int) -> weakref.ref[object]:
        model = made(way)
        model(X)
        stream = io.BytesIO()
        torch.save(dict(model.named_parameters()), stream)
        stream.seek(0)
        loaded = torch.load(stream)["0.weight"]
        assert type(loaded) is nn.Parameter and torch.equal(loaded, model[0].weight)
        assert not vars(loaded)
        return weakref.ref(state_of(model).groups[0].parameters[0])

    gone = run_ranks(SIZE, body)
    gc.collect()  # here: of two ranks that collect at once, one would do nothing
    assert [one() for one in gone] == [None] * SIZE


NEXT = {
    "forward": lambda model, loss: model(X),
    "backward": lambda model, loss: loss.backward(),
    "state_dict": lambda model, loss: model.state_dict(),
    "reshard": lambda model, loss: model.reshard(),
}


@pytest.mark.parametrize("then", NEXT)
@on_ranks(SIZE)
def test_a_write_into_it_is_refused_and_says_why(rank: int, way: str, then: str) -> None:
    model = made(way)
    loss = model(X).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    with pytest.raises(ModuleError, match=r"reshard\(\).*no_grad") as error:
        NEXT[then](model, loss)
    assert error.value.parameters == ("0.weight",)
    model(X).sum().backward()
    assert torch.equal(whole(model[0].weight.grad), torch.ones(2, 2))


@on_ranks(SIZE)
def test_writes_of_a_forward_into_its_own_copy_are_not_refused(rank: int) -> None:
    """With *gathered* each rank has a copy, which a module may change while it runs."""

    model = made("gathered")

    def halve(module: Any, _: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    model[0].register_forward_pre_hook(halve)
    for _ in range(2):
        model(X)
    model(X).sum().backward()
    assert torch.equal(whole(model[0].weight.grad), torch.ones(2, 2))


@on_ranks(SIZE)
def test_an_optimizer_that_is_made_meanwhile_is_given_the_shards(rank: int, way: str) -> None:
    model = made(way)
    before = whole(model[0].weight)
    loss = model(X).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss.backward()
    optimizer.step()
    assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)
    assert torch.equal(whole(model[0].weight), before - 1)


def without_backward(model: Any) -> None:
    model(X)


def with_graph_kept(model: Any) -> None:
    model(X).sum().backward(retain_graph=True)


def by_hand(model: Any) -> None:
    model.unshard()


@pytest.mark.parametrize("before", [without_backward, with_graph_kept, by_hand])
@on_ranks(SIZE)
def test_unshard_shows_what_an_optimizer_has_written_since(
    rank: int, way: str, before: Any
) -> None:
    """Which is no write of the program into the unsharded parameters."""

    model = made(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model[0].weight
    model(X).sum().backward()
    before(model)
    optimizer.step()
    model.unshard()
    seen = model[0].weight.detach().clone()
    model(X).sum().backward()
    model.reshard()
    assert torch.equal(seen, whole(weight))
