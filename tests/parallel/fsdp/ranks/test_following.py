"""Ranks that make different numbers of forwards: followed inside `follow`, errors outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.errors import Desync, PeerLost, PerformanceWarning, UsageError
from dure.fsdp import follow, strategy
from dure.testing import run_ranks
from dure.training import join
from tests.parallel.fsdp.ranks.fsdp_models import Block, making, shard
from tests.thread_ranks import on_ranks


class Words(nn.Module):
    """Gives the next word; even ones skip a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, 9)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        x = self.embed(word)
        for number, block in enumerate(self.blocks):
            if number != 1 or int(word) % 2:
                x = block(x)
        return self.head(x)


def made() -> Words:
    with making:
        torch.manual_seed(5)
        return Words()


def sharded(way: str) -> Any:
    with strategy(way):
        return shard(made())


def words(model: nn.Module, first: int, count: int) -> Iterator[int]:
    word = torch.tensor(first)
    for _ in range(count):
        word = model(word).argmax()
        yield int(word)


def warm(model: nn.Module) -> None:
    """All modules, on all ranks: their order."""
    model(torch.tensor(1)).sum().backward()


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (5, 0), (0, 0), (2, 6, 0, 3)])
def test_ranks_that_are_done_follow_the_others(way, counts):
    def body(rank: int) -> list[list[int]]:
        model = sharded(way)
        warm(model)
        made = []
        for turn in range(2):
            with follow(model), torch.no_grad():
                made.append(list(words(model, rank + turn, counts[rank])))
            warm(model)
        return made

    reference = made()
    expected = [
        [list(words(reference, rank + turn, count)) for turn in range(2)]
        for rank, count in enumerate(counts)
    ]
    assert run_ranks(len(counts), body) == expected


def caught(kind: type[dure.DureError], call: Any, *args: Any) -> Any:
    with pytest.raises(kind) as error, torch.no_grad():
        call(*args)
    return error.value


def outside_of_a_block(model: Any, rank: int) -> None:
    list(words(model, 1, (1, 2)[rank]))
    dure.barrier()


def test_a_rank_that_follows_very_often_is_not_warned(way, monkeypatch, recwarn):
    monkeypatch.setattr(join, "_MANY_ROUNDS", 3)

    def body(rank: int) -> None:
        model = sharded(way)
        warm(model)
        with follow(model), torch.no_grad():
            list(words(model, 1, 6 * rank))

    run_ranks(2, body)
    assert not [each for each in recwarn if each.category is PerformanceWarning]


@on_ranks(2)
def test_outside_of_it_the_error_names_module_and_ranks(rank, way):
    model = sharded(way)
    warm(model)
    error = caught(Desync, outside_of_a_block, model, rank)
    assert set(error.calls) == {0, 1}
    if rank == 1:
        assert error.calls[1].endswith("for the module (root)")
        assert "follow" in error.fix


def call_different_modules(model: Any, rank: int) -> None:
    with follow(model):
        if rank:
            model(torch.tensor(1))
        else:
            model.blocks[2](torch.ones(6))


@on_ranks(2)
def test_ranks_that_differ_are_named_with_their_modules(rank, way):
    model = sharded(way)
    warm(model)
    calls = caught(Desync, call_different_modules, model, rank).calls
    assert calls == {0: "forward of blocks.2", 1: "forward of (root)"}


def raise_within(model: Any, rank: int) -> None:
    with follow(model):
        if rank == 0:
            raise ArithmeticError
        model(torch.tensor(1))


@on_ranks(2)
def test_a_rank_that_raises_ends_the_block_of_the_others(rank, way):
    model = sharded(way)
    warm(model)
    kind = PeerLost if rank else ArithmeticError
    with pytest.raises(kind) as error, torch.no_grad():
        raise_within(model, rank)
    if isinstance(error.value, PeerLost):
        assert error.value.peer == 0
    warm(model)


def follow_unprepared(model: Any, rank: int) -> None:
    with follow(model):
        list(words(model, 1, rank))


@on_ranks(2)
def test_misuse_is_refused(rank, way):
    error = caught(UsageError, follow_unprepared, sharded("gathered"), rank)
    unable = "rank 0: has run out of inputs, and cannot follow"
    assert error.seen == f"{unable}; rank 1: forward of (root)"
    assert "one forward first" in error.fix
    model = sharded(way)
    warm(model)
    with pytest.raises(UsageError, match="without gradients"), follow(model):
        model(torch.tensor(1))
    with pytest.raises(UsageError, match="within another"), follow(model), follow(model):
        pass
    warm(model)
