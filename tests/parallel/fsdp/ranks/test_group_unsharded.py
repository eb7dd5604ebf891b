"""A forward with gradients, and no backward, leaves the root's parameters unsharded."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from tests.parallel.fsdp.ranks.fsdp_models import by_parts, filled, whole
from tests.thread_ranks import on_ranks

SIZE = 2
X = torch.ones(1, 2)


def made(way: str) -> Any:
    """Return a model whose root has the weight [[-1, -1/3], [1/3, 1]]."""
    model: Any = filled(nn.Sequential(nn.Linear(2, 2, bias=False)))
    return by_parts(way, model)


NEXT = {
    "forward": lambda model, loss: model(X),
    "backward": lambda model, loss: loss.backward(),
    "state_dict": lambda model, loss: model.state_dict(),
    "reshard": lambda model, loss: model.reshard(),
}


@pytest.mark.parametrize("then", NEXT)
@on_ranks(SIZE)
def test_a_write_into_it_is_refused_and_says_why(rank, way, then):
    model = made(way)
    loss = model(X).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    with pytest.raises(ModuleError, match=r"reshard\(\).*no_grad") as error:
        NEXT[then](model, loss)
    assert error.value.parameters == ("0.weight",)
    model(X).sum().backward()
    assert torch.equal(whole(model[0].weight.grad), torch.ones(2, 2))


def without_backward(model: Any) -> None:
    model(X)


def with_graph_kept(model: Any) -> None:
    model(X).sum().backward(retain_graph=True)


def by_hand(model: Any) -> None:
    model.unshard()


@pytest.mark.parametrize("before", [without_backward, with_graph_kept, by_hand])
@on_ranks(SIZE)
def test_unshard_shows_what_an_optimizer_has_written_since(rank, way, before):
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
