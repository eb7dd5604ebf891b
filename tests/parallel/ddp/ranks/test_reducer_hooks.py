"""DDP and the hooks of the program: which gradient they see, how often, and when.

Rank r has the input r + 1, so that a weight's gradient is r + 1, and 1.5 on average over two ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.parallel.ddp.replicate import replicate
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks


def linear() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def backward(module: nn.Module, rank: int) -> None:
    module(torch.ones(1, 1) * (rank + 1)).sum().backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "reduced in bfloat16": {"mixed_precision": dist.MixedPrecision(reduce_dtype=torch.bfloat16)},
}


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after"])
@on_ranks(2)
def test_optimizer_within_backward_steps_with_the_average_2_ranks(
    rank: int, options: str, is_before: bool
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(weight: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        optimizer.step()
        weight.grad = None

    handle = model.weight.register_post_accumulate_grad_hook(step) if is_before else None
    ddp = dist.DistributedDataParallel(model, **OPTIONS[options])
    if handle is None:
        handle = model.weight.register_post_accumulate_grad_hook(step)
    values: list[float] = []
    for _ in range(3):
        backward(ddp, rank)
        assert model.weight.grad is None
        values.append(model.weight.item())
    handle.remove()
    backward(ddp, rank)
    assert model.weight.grad is not None and model.weight.grad.item() == 1.5
    assert [*values, model.weight.item()] == [0.25, -0.5, -1.25, -1.25]


def seen_by_hooks(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> tuple[Any, list[float]]:
    """Return a wrapped layer, and the list to which a hook of its weight adds gradients."""
    model, seen = linear(), []
    model.weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.item()))
    return wrap(model), seen


@on_ranks(2)
def test_hooks_wait_for_the_reduction_of_kept_sums_2_ranks(rank: int) -> None:
    ddp, seen = seen_by_hooks(rank, dist.DistributedDataParallel)
    with ddp.no_sync():
        backward(ddp, rank)
        backward(ddp, rank)
    assert seen == []
    backward(ddp, rank)
    assert seen == [4.5]
    with ddp.no_sync():
        backward(ddp, rank)
    ddp.reduce_gradients()
    assert seen == [4.5, 6.0]


@on_ranks(2)
def test_hooks_run_on_ranks_that_have_not_used_a_parameter_2_ranks(rank: int) -> None:
    model, seen = nn.ModuleList([linear(), linear()]), []
    model.forward = lambda x: model[int(x.item()) - 1](x)  # type: ignore[method-assign]
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(
            lambda w, i=i: seen.append((i, w.grad.item()))
        )
    ddp = dist.DistributedDataParallel(model, find_unused_parameters=True)
    backward(ddp, rank)
    assert sorted(seen) == [(0, 0.5), (1, 1.0)]


@on_ranks(2)
def test_ranks_without_inputs_step_within_backward_as_the_others_do_2_ranks(rank: int) -> None:
    model, seen = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(weight: torch.Tensor) -> None:
        seen.append(weight.grad.item())  # type: ignore[union-attr]
        optimizer.step()
        weight.grad = None

    model.weight.register_post_accumulate_grad_hook(step)
    ddp = dist.DistributedDataParallel(model)
    with ddp.join():
        for _ in range(rank + 1):
            backward(ddp, rank)
    assert (seen, model.weight.item()) == ([1.5, 1.0], -0.25)
    # In the second step rank 0 adds nothing to rank 1's gradient of 2.


@on_ranks(2)
def test_hooks_run_at_once_where_the_wrapper_was_not_called_2_ranks(rank: int) -> None:
    ddp, seen = seen_by_hooks(rank, dist.DistributedDataParallel)
    backward(ddp.module, rank)
    assert seen == [[1.0], [2.0]][rank]


def test_hooks_do_not_run_in_a_step_that_fails_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        def wrap(layer: nn.Module) -> nn.Module:
            both = nn.ModuleList([layer, linear()])
            both.forward = layer.forward  # type: ignore[method-assign]
            return dist.DistributedDataParallel(both)

        ddp, seen = seen_by_hooks(rank, wrap)
        with pytest.raises(ModuleError):
            backward(ddp, rank)
        return seen

    assert run_ranks(2, rank_main) == [[], []]


@on_ranks(2)
def test_hooks_run_once_where_an_earlier_wrapper_is_still_there_2_ranks(rank: int) -> None:
    earlier, seen = seen_by_hooks(rank, dist.DistributedDataParallel)
    backward(dist.DistributedDataParallel(earlier.module), rank)
    assert seen == [1.5]


def test_hooks_run_as_in_one_process_after_the_wrapper_is_gone_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp, seen = seen_by_hooks(rank, dist.DistributedDataParallel)
        model = ddp.module
        second = model.weight.register_post_accumulate_grad_hook(lambda _: seen.append(-1.0))
        backward(ddp, rank)
        del ddp
        gc.collect()
        model.zero_grad()
        backward(model, rank)
        second.remove()
        model.zero_grad()
        backward(model, rank)
        return seen

    first, other = run_ranks(2, rank_main)
    assert first == [1.5, -1.0, 1.0, -1.0, 1.0]
    assert other == [1.5, -1.0, 2.0, -1.0, 2.0]


@on_ranks(2)
def test_replicated_module_has_the_same_hooks_2_ranks(rank: int) -> None:
    module, seen = seen_by_hooks(rank, replicate)
    backward(module, rank)
    assert seen == [1.5]


class Recorded(nn.Module):
    """A layer with every hook of torch's modules and tensors; `seen` has them as they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


def hook_up(module: nn.Module, name: str, seen: list[tuple[Any, ...]]) -> None:
    def add(*what: Any) -> None:
        seen.append((name, *what))

    module.register_forward_pre_hook(lambda _, args: add("pre", args[0].item()))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] * 2,), {**kwargs}), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(lambda _, args, out: add("forward", args[0].item(), out.item()))
    module.register_forward_hook(
        lambda _, args, kwargs, out: out * 3, with_kwargs=True, always_call=True
    )
    module.register_full_backward_pre_hook(lambda _, out: add("backward pre", out[0].item()))
    module.register_full_backward_pre_hook(lambda _, out: (out[0] * 5,))
    module.register_full_backward_hook(
        lambda _, grad_in, out: add("backward", [g.item() for g in grad_in if g is not None])
    )


def everything(wrap: Callable[[nn.Module], Any], is_before: bool, x: float) -> list[Any]:
    """Run a step with hooks on the wrapped module, one within, its weight and the optimizer."""
    model = Recorded()
    seen, weight = model.seen, model.layer.weight

    def add_hooks(outer: Any) -> None:
        hook_up(model.layer, "layer", seen)
        hook_up(outer, "model", seen)
        weight.register_hook(lambda g: g * 7)
        torch.autograd.graph.register_multi_grad_hook(
            [weight], lambda gs: seen.append(("multi", gs[0].item()))
        )

    if is_before:
        add_hooks(model)
    wrapped = wrap(model)
    if not is_before:
        add_hooks(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before step", weight.grad.item())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after step", weight.item())))
    wrapped(torch.full((1, 1), x, requires_grad=True), scale=11.0).sum().backward()
    optimizer.step()
    return seen


@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after"])
@pytest.mark.parametrize("wrap", [dist.DistributedDataParallel, replicate])
def test_other_hooks_run_as_in_one_process_2_ranks(wrap: Any, is_before: bool) -> None:
    alone = [everything(lambda m: m, is_before, x) for x in (1.0, 2.0)]
    # The weight's gradients are those of one process, and only then averaged.
    gradients = [next(s[1] for s in each if s[0] == "before step") for each in alone]
    mean = sum(gradients) / 2
    found = run_ranks(2, lambda rank: everything(wrap, is_before, rank + 1.0))
    for mine, expected in zip(found, alone, strict=True):
        assert mine[:-2] == expected[:-2]
        assert mine[-2:] == [("before step", mean), ("after step", 1 - mean)]
