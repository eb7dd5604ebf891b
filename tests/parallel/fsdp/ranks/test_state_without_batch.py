"""Ranks without a batch, or with a shorter way through the model, take part with zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import UsageError
from dure.fsdp import FSDPModule, join_step
from tests.parallel.fsdp.ranks.fsdp_models import (
    Block,
    Net,
    batch,
    by_step,
    compare,
    loss_of,
    making,
    mine,
    shard,
    sharded,
)
from tests.thread_ranks import on_ranks


class Tail(nn.Module):
    """Gives what its last block does, unchanged, or in some steps what an earlier one does."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 2
        self.embed = nn.Embedding(11, 11)
        self.blocks = nn.ModuleList([Block(11) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, outputs = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return outputs[self.used - 1]


def tail() -> Any:
    with making:
        torch.manual_seed(1)
        return Tail().double()


def alone(
    has_batch: Callable[[int, int, int], bool],
    model: nn.Module,
    number: int,
    size: int = 3,
    microbatches: int = 1,
    begin: Callable[[Any, int, int], None] = lambda model, number, rank: None,
) -> torch.Tensor:
    """Train on the batches of all ranks: the mean over all ranks, also those without."""
    losses = []
    for rank in range(size):
        begin(model, number, rank)
        for k in range(microbatches):
            if has_batch(rank, number, k):
                loss = loss_of(model, mine(batch(number + 10 * k), size, rank)) / size
                loss.backward()
                losses.append(loss.detach())
    return torch.stack(losses).sum()


def runs_out(rank: int, number: int, k: int = 0) -> bool:
    """Rank 1 has a batch in the first step only, rank 2 in the first two."""
    return number <= (0, 0, 1)[rank] or rank == 0


def until_batches_end(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    if runs_out(rank, number):
        return by_step(model, number, size, rank)
    join_step(model)
    return torch.zeros((), dtype=torch.double)


def beside_replicas(model: Net) -> None:
    shard(model, mesh=init_device_mesh("cpu", (3, 1)))


@pytest.mark.parametrize(
    "scenario",
    [
        {},
        {"prepare": partial(shard, reshard_after_forward=False)},
        {"prepare": beside_replicas},
        {"make": tail},  # the last block's gradient arrives as the root's does
    ],
    ids=["default", "kept", "replicas", "tail"],
)
def test_ranks_run_out_of_batches(way: str, scenario: dict[str, Any]) -> None:
    compare(way, 3, step=until_batches_end, expected_step=partial(alone, runs_out), **scenario)


def test_a_rank_trains_only_what_is_below_an_earlier_block(way: str) -> None:
    """Its backward begins at another module than those of the others, which are in one order."""

    def choose(model: Any, number: int, rank: int) -> None:
        model.used = 1 if number > 0 and rank == 1 else 2

    def early(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        choose(model, number, rank)
        return by_step(model, number, size, rank)

    expected = partial(alone, lambda *_: True, begin=choose)
    compare(way, 3, make=tail, step=early, expected_step=expected)


def test_a_step_of_several_batches(way: str) -> None:
    """Rank 1 has no batch for the second of three; gradients are reduced at the last."""

    def has_batch(rank: int, number: int, k: int) -> bool:
        return not (rank == 1 and k == 1)

    def accumulate(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        losses = []
        for k in range(3):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(k == 2)
            if not has_batch(rank, number, k):
                join_step(model)
                continue
            loss = loss_of(model, mine(batch(number + 10 * k), size, rank))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    expected = partial(alone, has_batch, size=2, microbatches=3)
    compare(way, 2, step=accumulate, expected_step=expected)


@on_ranks(2)
def test_evaluation_without_a_batch(rank: int, way: str) -> None:
    model = sharded(way)
    by_step(model, 0, 2, rank)
    with torch.no_grad():
        if rank == 0:
            loss_of(model, batch(1))
        else:
            join_step(model)
    by_step(model, 1, 2, rank)


@on_ranks(2)
def test_misuse_is_refused(rank: int, way: str) -> None:
    model = sharded(way)
    with pytest.raises(UsageError, match="outermost"):
        join_step(model.head)
    with pytest.raises(UsageError, match="first step needs a batch"):
        join_step(model)
    with torch.no_grad():
        loss_of(model, batch(0))
    with pytest.raises(UsageError, match="first step needs a batch"):
        join_step(model)
    with pytest.raises(UsageError, match="outermost"):
        join_step(model.blocks[0])
