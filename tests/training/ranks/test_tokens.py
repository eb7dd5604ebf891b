"""Gradients that are exact per token: unequal counts, accumulation and context axes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.device_mesh import init_device_mesh
from dure.errors import UsageError
from dure.fsdp import DataParallelMeshDims, FSDPModule, scale_by
from dure.tensor import DTensor, Replicate
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import by_parts

WORDS, WIDTH = 7, 4
IGNORED = -100
# For each microbatch the labels of the rows [2 rows, 6 positions] that count.
COUNTING = ([[6, 1], [0, 0]], [[2, 5], [3, 0]])


@pytest.fixture(params=["gathered", "shared", "ddp"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def made() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def microbatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words and labels [4 rows, 6 positions]."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for counting in COUNTING:
        words, labels = torch.randint(WORDS, (2, 4, 6), generator=generator)
        for row, count in enumerate(n for two in counting for n in two):
            labels[row, count:] = IGNORED
        made.append((words, labels))
    return made


def sum_of_losses(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        model(words).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )


def expected() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of one process: the mean over the 17 tokens of the step."""
    model = made()
    batches = microbatches()
    assert sum(int((labels != IGNORED).sum()) for _, labels in batches) == 17
    loss = torch.stack([sum_of_losses(model, *batch) for batch in batches]).sum() / 17
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach(), gradients


def parallel(way: str, **options: Any) -> nn.Module:
    if way == "ddp":
        return dure.DistributedDataParallel(made(), init_sync=False)
    return by_parts(way, made(), **options)


def check(size: int, step: Callable[[int], tuple[nn.Module, torch.Tensor]]) -> None:
    def body(rank: int) -> Any:
        model, loss = step(rank)
        gradients: list[Any] = [p.grad for p in model.parameters()]
        return loss, [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]

    loss, gradients = expected()
    results = run_ranks(size, body)
    torch.testing.assert_close(torch.stack([r[0] for r in results]).mean(), loss)
    for _, got in results:
        torch.testing.assert_close(got, gradients)


def no_sync(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext() if last or isinstance(model, FSDPModule) else model.no_sync()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [False, True])
def test_ranks_with_unequal_counts(way: str, size: int, accumulate: bool) -> None:
    """With 4 ranks, ranks 2 and 3 have nothing in the first microbatch, rank 3 nothing at all."""

    def step(rank: int) -> tuple[nn.Module, torch.Tensor]:
        model = parallel(way)
        mine = [[t.chunk(size)[rank] for t in batch] for batch in microbatches()]
        scale = scale_by([labels != IGNORED for _, labels in mine])
        losses = []
        for number, batch in enumerate(mine):
            with no_sync(model, not accumulate or number == len(mine) - 1):
                loss = sum_of_losses(model, *batch) * scale
                loss.backward()
            losses.append(loss.detach())
        return model, torch.stack(losses).sum()

    check(size, step)


def test_context_axes(way: str) -> None:
    """Two data ranks of two context ranks each: rows are divided over one axis, positions over
    the other."""

    def step(rank: int) -> tuple[nn.Module, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        over = DataParallelMeshDims(shard=("dp", "cp"))
        model = parallel(way, mesh=mesh, dp_mesh_dims=over)
        data, context = divmod(rank, 2)
        mine = [
            [t.chunk(2)[data].chunk(2, dim=1)[context] for t in batch] for batch in microbatches()
        ]
        scale = scale_by(sum(int((labels != IGNORED).sum()) for _, labels in mine), mesh)
        words, labels = (torch.cat([batch[i] for batch in mine]) for i in (0, 1))
        loss = sum_of_losses(model, words, labels) * scale
        loss.backward()
        return model, loss.detach()

    check(4, step)


def test_no_tokens_at_all_is_no_gradient() -> None:
    assert run_ranks(2, lambda rank: scale_by(0)) == [0.0, 0.0]


def test_weights_are_added_up() -> None:
    """0.5 + 1.5 on rank 0, twice that on rank 1: 6 in all, for 2 ranks."""
    weights = torch.tensor([0.5, 1.5])
    assert run_ranks(2, lambda rank: scale_by(weights * (1 + rank))) == [2 / 6, 2 / 6]


@pytest.mark.parametrize("wrong", ["negative", "nan", "dtensor"])
def test_invalid_counts_are_refused_on_all_ranks(wrong: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mask = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        counts: dict[str, Any] = {"negative": -1, "nan": float("nan"), "dtensor": mask}
        with pytest.raises(UsageError) as error:
            scale_by(counts[wrong] if rank == 1 else 3)
        assert error.value.op == "scale_by"

    run_ranks(2, body)
