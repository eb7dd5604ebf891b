"""Gradients that are reduced to shards: how they are stored."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import explain, fully_shard
from dure.tensor import DTensor, Shard
from dure.testing import CommRecorder, run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import by_parts, compare
from tests.thread_ranks import on_ranks


def test_a_gradient_of_uneven_columns_has_the_strides_of_its_shard():
    weight = torch.arange(20.0).reshape(4, 5)

    def body(rank: int) -> None:
        model = nn.Linear(5, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        fully_shard(model, shard_placement_fn=lambda p: Shard(1))
        model(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        grad = model.weight.grad.to_local()
        assert grad.stride() == model.weight.to_local().stride() == ((3, 1), (2, 1))[rank]
        torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
        expected = weight - torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        assert torch.equal(model.weight.full_tensor(), expected)

    run_ranks(2, body)


# --------------------------------------------------------------------------------------------------
# Frozen and low-rank: only trained parameters have gradients and state, and are reduced.


WIDTH, RANK, LAYERS = 12, 2, 2
BASE = WIDTH * WIDTH
ADAPTER = 2 * RANK * WIDTH


class Quantized(nn.Module):
    """A frozen int8 weight [out, in] with a scale a row, and low-rank factors beside it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        drawn = torch.arange(BASE).view(WIDTH, WIDTH) * (7 + number) % 251 - 125
        self.weight = nn.Parameter(drawn.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.001, 0.002, WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.linspace(-0.1, 0.1, RANK * WIDTH).view(RANK, WIDTH))
        self.up = nn.Parameter(torch.linspace(-0.2, 0.1, RANK * WIDTH).view(WIDTH, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.weight.to(x.dtype) * self.scale[:, None]
        return torch.tanh(x @ base.t() + x @ self.down.t() @ self.up.t())


def made() -> nn.Sequential:
    return nn.Sequential(*(Quantized(number) for number in range(LAYERS)))


def layers_apart(model: nn.Module) -> Any:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    rows = torch.linspace(-1, 1 + number, 4 * WIDTH).view(4, WIDTH).chunk(size)[rank]
    loss = (model(rows) - 0.3).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("size", [1, 4])
def test_adapters_train_as_on_one_rank(way, size):
    compare(way, size, layers_apart, step, expected_step=step, make=made)


@on_ranks(2)
def test_frozen_parameters_have_no_gradient_and_no_state_and_are_not_reduced(rank, way):
    layers = made()
    model = by_parts(way, layers, *layers)
    report = explain(model)
    assert {g.module: g.numel for g in report.groups if g.trained} == {"0": ADAPTER, "1": ADAPTER}
    frozen = sum(g.numel for g in report.groups if not g.trained)
    assert frozen == LAYERS * (BASE + WIDTH)
    # Half of them on each rank; a gradient and two states of trained ones.
    assert report.trained_bytes == LAYERS * ADAPTER * 4 // 2
    assert report.frozen_bytes == LAYERS * (BASE + WIDTH * 4) // 2
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with CommRecorder() as seen:
        step(model, 0, 2, rank)
    optimizer.step()
    gradients = [p.grad.to_local().numel() for p in model.parameters() if p.grad is not None]
    assert sum(gradients) == LAYERS * ADAPTER // 2
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor)]
    assert sum(t.to_local().numel() for t in state) == 2 * LAYERS * ADAPTER // 2
    flags = 2  # each parameter of the group has one element a rank
    reduced = [e.nbytes for e in seen.events if e.op == "reduce_scatter_single"]
    assert reduced == [(ADAPTER + 2 * flags) * 4] * LAYERS


@on_ranks(2)
def test_at_most_two_groups_have_flat_gradients_at_the_same_time(rank):
    """The third group gets the memory of the first, which is freed before."""
    model: Any = layers_apart(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    groups = [g for layer in model for g in layer._groups()]
    others_begun: list[int] = []
    for group in groups:
        group.reduction = _Watched(
            group.reduction,
            lambda: others_begun.append(sum(g.reduction.is_begun for g in groups)),
        )
    model(torch.ones(2, 4)).sum().backward()
    assert others_begun == [0, 1, 1, 1, 1]


class _Watched:
    """A reduction that calls `before` when it begins."""

    def __init__(self, reduction: Any, before: Callable[[], object]) -> None:
        self._reduction, self._before = reduction, before

    def begin(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._before()
        self._reduction.begin(gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reduction, name)
