"""Hooks that torch documents on tensors, parameters, modules and optimizers, on what is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import making
from tests.thread_ranks import on_ranks

SIZE, LR = 2, 0.25


def made() -> Any:
    """Return two layers; the loss is the sum of what the second gives for ones."""
    with making:
        model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(8.0).view(4, 2))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    return model


# For an input [2, 1] that each rank multiplies by rank + 1: the mean over the ranks is 1.5 of it.
GRADIENT_0 = 1.5 * torch.tensor([[2.0, 1.0], [4.0, 2.0], [6.0, 3.0], [8.0, 4.0]])
GRADIENT_1 = 1.5 * torch.tensor([[1.0, 7.0, 13.0, 19.0]])


def sharded(way: str, model: Any = None) -> Any:
    model = made() if model is None else model
    with strategy(way):
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)


def backward(model: Any, rank: int, **how: Any) -> None:
    model(torch.tensor([[2.0, 1.0]]) * (rank + 1)).sum().backward(**how)


def full(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


@on_ranks(SIZE)
def test_hooks_run_once_per_gradient_after_the_reduction(rank: int, way: str) -> None:
    model = sharded(way)
    seen: list[tuple[str, Any]] = []
    first, second = model.parameters()
    first.register_hook(lambda g: seen.append(("tensor", full(g))))
    second.register_hook(lambda g: g * 2)
    first.register_post_accumulate_grad_hook(lambda p: seen.append(("after", full(p.grad))))
    handle = second.register_post_accumulate_grad_hook(lambda p: seen.append(("gone", None)))
    handle.remove()
    backward(model, rank)
    assert [name for name, _ in seen] == ["tensor", "after"]
    assert all(torch.equal(tensor, GRADIENT_0) for _, tensor in seen)
    assert torch.equal(full(second.grad), 2 * GRADIENT_1)
    backward(model, rank)
    assert [name for name, _ in seen] == ["tensor", "after"] * 2
    assert torch.equal(seen[-1][1], 2 * GRADIENT_0)  # with the first backward's


@on_ranks(SIZE)
def test_a_hook_of_several_parameters_runs_once_with_all_gradients(rank: int, way: str) -> None:
    model = sharded(way)
    seen: list[list[torch.Tensor]] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda gradients: seen.append([full(g) for g in gradients])
    )
    backward(model, rank)
    assert len(seen) == 1
    assert torch.equal(seen[0][0], GRADIENT_0)
    assert torch.equal(seen[0][1], GRADIENT_1)


def test_an_optimizer_may_step_in_backward(way: str) -> None:
    """Two steps, as one process makes them; hooks were registered before `fully_shard`."""

    def stepping(model: Any) -> None:
        optimizers: dict[str, torch.optim.Optimizer] = {}

        def step(name: str, parameter: Any) -> None:
            if name not in optimizers:
                optimizers[name] = torch.optim.SGD([parameter], lr=LR)
            optimizers[name].step()
            parameter.grad = None

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: step(name, p))

    one = made()
    stepping(one)
    for _ in range(2):
        one(torch.tensor([[2.0, 1.0]]) * 1.5).sum().backward()

    def body(rank: int) -> list[torch.Tensor]:
        model = made()
        stepping(model)
        sharded(way, model)
        for _ in range(2):
            backward(model, rank)
        assert all(p.grad is None for p in model.parameters())
        return [full(p) for p in model.parameters()]

    for weights in run_ranks(SIZE, body):
        for found, expected in zip(weights, one.parameters(), strict=True):
            assert torch.equal(found, expected.detach())


@on_ranks(SIZE)
def test_hooks_of_one_rank_hang_nobody(rank: int, way: str) -> None:
    model, seen = sharded(way), []
    if rank == 0:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
    backward(model, rank, retain_graph=True)
    backward(model, rank)
    assert len(seen) == (4 if rank == 0 else 0)


@on_ranks(SIZE)
def test_hooks_run_at_the_backward_that_reduces(rank: int, way: str) -> None:
    model, seen = sharded(way), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    model.set_requires_gradient_sync(False)
    backward(model, rank)
    assert not seen
    model.set_requires_gradient_sync(True)
    backward(model, rank)
    assert len(seen) == 2
    assert torch.equal(full(model[0].weight.grad), 2 * GRADIENT_0)


@on_ranks(SIZE)
def test_an_error_of_a_hook_reaches_the_caller_and_the_next_step_works(rank: int, way: str) -> None:
    model = sharded(way)

    def fail(_: object) -> None:
        raise KeyError("of the program")

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model[0].weight, register)(fail)
        with pytest.raises(KeyError):
            backward(model, rank)
        handle.remove()
        model.zero_grad()
        backward(model, rank)
        assert torch.equal(full(model[0].weight.grad), GRADIENT_0)
        model.zero_grad()


@on_ranks(SIZE)
def test_hooks_of_modules_and_optimizers_run(rank: int, way: str) -> None:
    model, seen = sharded(way), []
    layer = model[1]
    layer.register_forward_pre_hook(lambda *_: seen.append("before forward"))
    layer.register_forward_hook(lambda *_: seen.append("after forward"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("before backward"))
    layer.register_full_backward_hook(lambda *_: seen.append("after backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    backward(model, rank)
    optimizer.step()
    parts = ("forward", "backward", "step")
    assert seen == [f"{when} {part}" for part in parts for when in ("before", "after")]
    assert torch.equal(full(model[0].weight), torch.arange(8.0).view(4, 2) - LR * GRADIENT_0)
