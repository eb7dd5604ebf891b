"""Backwards that do not begin at a module's output, that are repeated, that fail."""

# A gradient may be None to pyright.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.fsdp import fully_shard, strategy
from tests.parallel.fsdp.ranks.fsdp_models import making, whole
from tests.thread_ranks import on_ranks

SIZE = 2


class Net(nn.Module):
    """y = b(a * x), of two vectors; keeps a * x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.inner = nn.Linear(2, 2, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.feature = self.a * x
        return self.inner(self.feature)


def made(way: str) -> Any:
    with making:
        model = Net()
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    with strategy(way):
        fully_shard(model.inner)
        return fully_shard(model)


X = torch.tensor([2.0, 4.0])


@on_ranks(SIZE)
def test_a_loss_on_a_feature_gives_gradients_and_leaves_nothing(rank: int, way: str) -> None:
    model = made(way)
    for _ in range(2):
        model.zero_grad()
        model(X)
        model.feature.sum().backward()
        assert torch.equal(whole(model.a.grad), X)
        assert model.inner.weight.grad is None
        assert model.unused.grad is None
        model.zero_grad()
        model(X).sum().backward()
        assert torch.equal(whole(model.a.grad), torch.tensor([8.0, 24.0]))
        assert torch.equal(whole(model.inner.weight.grad), torch.tensor([[2.0, 8.0]] * 2))
        assert model.unused.grad is None


WAYS_TO_WRITE = {
    "parameter": lambda p: p.mul_(2),
    "local tensor": lambda p: p.to_local().mul_(2),
    "optimizer": lambda p: torch.optim.SGD([p], lr=1.0).step(),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),  # pyright: ignore
}


@pytest.mark.parametrize("write", WAYS_TO_WRITE)
@on_ranks(SIZE)
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


@on_ranks(SIZE)
def test_writing_what_backward_does_not_read_is_allowed(rank: int, way: str) -> None:
    """The weight of the first layer is read by no other gradient, as the input needs none."""

    with making:
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with strategy(way):
        fully_shard(model[0])
        fully_shard(model)
    loss = model(X).sum()
    with torch.no_grad():
        model[0].reshard()
        model[0].weight.zero_()
    loss.backward()
    assert model[0].weight.grad is not None


@on_ranks(SIZE)
def test_a_write_before_a_backward_through_a_feature_is_refused_and_named(rank: int) -> None:
    """With *shared* the backward is noticed after it has read the weight."""

    model = made("shared")
    model.inner.register_forward_hook(lambda *_: None)
    model(X)
    with torch.no_grad():
        model.reshard()
        model.a.mul_(2)
    with pytest.raises(ModuleError) as error:
        model.feature.sum().backward()
    assert error.value.parameters == ("a",)
    model.zero_grad()
    model(X)
    model.feature.sum().backward()
    assert torch.equal(whole(model.a.grad), X)


@on_ranks(SIZE)
def test_a_gradient_penalty_alone(rank: int, way: str) -> None:
    """The slope of b(a * x) by x is a * (sum of the rows of b); its square by a and b."""

    model = made(way)
    for _ in range(2):
        model.zero_grad()
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert model.a.grad is None
        assert slope.tolist() == [4.0, 12.0]
        slope.square().sum().backward()
        assert torch.equal(whole(model.a.grad), torch.tensor([32.0, 144.0]))
        expected = torch.tensor([[8.0, 48.0]] * 2)
        assert torch.equal(whole(model.inner.weight.grad), expected)


@on_ranks(SIZE)
def test_a_backward_that_makes_a_graph_of_gradients_is_refused(rank: int, way: str) -> None:
    model = made(way)
    with pytest.raises(ModuleError) as error:
        model(X).square().sum().backward(create_graph=True)
    assert error.value.parameters
    model.zero_grad()
    model(X).sum().backward()
    assert torch.equal(whole(model.a.grad), torch.tensor([8.0, 24.0]))


@on_ranks(SIZE)
def test_after_a_backward_that_raised_another_one_gives_all_gradients(rank: int, way: str) -> None:
    model = made(way)
    out = model(X)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("once")

    handle = model.feature.register_hook(fail)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    out.sum().backward()
    assert torch.equal(whole(model.a.grad), torch.tensor([8.0, 24.0]))
    assert torch.equal(whole(model.inner.weight.grad), torch.tensor([[2.0, 8.0]] * 2))


@on_ranks(SIZE)
def test_a_kept_graph_leaves_shards_in_the_modules(rank: int, way: str) -> None:
    """So that clipping and optimizers that ask the model see gradients."""

    model = made(way)
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    assert all(p.grad is not None for n, p in model.named_parameters() if n != "unused")


@on_ranks(SIZE)
def test_parameters_replaced_between_forward_and_backward_are_named(rank: int, way: str) -> None:
    model = made(way)
    model(X)
    feature = model.feature
    model.double()
    model(X.double())
    with pytest.raises(ModuleError) as error:
        feature.sum().backward()
    assert error.value.parameters == ("a",)
