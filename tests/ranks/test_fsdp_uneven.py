"""A rank without a batch takes part in a step with zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import UsageError
from dure.fsdp import FSDPModule, fully_shard, join_step, strategy
from dure.testing import run_ranks
from ranks.fsdp_models import Block, batch, by_step, compare, loss_of, made, making, mine, shard


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def has_batch(rank: int, number: int) -> bool:
    """Rank 1 has a batch in the first step only, rank 2 in the first two."""
    return number <= (0, 0, 1)[rank] or rank == 0


def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    if has_batch(rank, number):
        return by_step(model, number, size, rank)
    join_step(model)
    return torch.zeros((), dtype=torch.double)


def expected(model: nn.Module, number: int) -> torch.Tensor:
    """The same batches on one rank: the mean over all ranks, also those without."""
    losses = []
    for rank in range(3):
        if has_batch(rank, number):
            loss = loss_of(model, mine(batch(number), 3, rank)) / 3
            loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum()


@pytest.mark.parametrize("kept", [None, False])
def test_ranks_run_out_of_batches(way: str, kept: bool | None) -> None:
    compare(
        way,
        3,
        prepare=lambda m: shard(m, reshard_after_forward=kept),
        step=step,
        expected_step=expected,
    )


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


def test_the_last_block_makes_the_output(way: str) -> None:
    """Its own gradient arrives as the root's does, which the step is one of."""
    compare(way, 3, make=tail, step=step, expected_step=expected)


def test_a_rank_trains_only_what_is_below_an_earlier_block(way: str) -> None:
    """Its backward begins at another module than those of the others, which are in one order."""

    def exits_early(rank: int, number: int) -> bool:
        return number > 0 and rank == 1

    def early(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        model.used = 1 if exits_early(rank, number) else 2
        return by_step(model, number, size, rank)

    def one(model: Any, number: int) -> torch.Tensor:
        losses = []
        for rank in range(3):
            model.used = 1 if exits_early(rank, number) else 2
            loss = loss_of(model, mine(batch(number), 3, rank)) / 3
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    compare(way, 3, make=tail, step=early, expected_step=one)


def test_beside_replicas(way: str) -> None:
    def prepare(model: Any) -> None:
        shard(model, mesh=init_device_mesh("cpu", (3, 1)))

    compare(way, 3, prepare=prepare, step=step, expected_step=expected)


def test_a_step_of_several_batches(way: str) -> None:
    """Rank 1 has no batch for the second of three; gradients are reduced at the last."""

    def gap(number: int, k: int, rank: int) -> bool:
        return rank == 1 and k == 1

    def accumulate(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        losses = [torch.zeros((), dtype=torch.double)]
        for k in range(3):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(k == 2)
            if gap(number, k, rank):
                join_step(model)
                continue
            loss = loss_of(model, mine(batch(number + 10 * k), size, rank))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def one(model: nn.Module, number: int) -> torch.Tensor:
        losses = []
        for rank in range(2):
            for k in range(3):
                if not gap(number, k, rank):
                    loss = loss_of(model, mine(batch(number + 10 * k), 2, rank)) / 2
                    loss.backward()
                    losses.append(loss.detach())
        return torch.stack(losses).sum()

    compare(way, 2, step=accumulate, expected_step=one)


def test_evaluation_without_a_batch(way: str) -> None:
    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            shard(model)
        by_step(model, 0, 2, rank)
        with torch.no_grad():
            if rank == 0:
                loss_of(model, batch(1))
            else:
                join_step(model)
        by_step(model, 1, 2, rank)

    run_ranks(2, body)


def test_what_is_refused(way: str) -> None:
    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
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

    run_ranks(2, body)
