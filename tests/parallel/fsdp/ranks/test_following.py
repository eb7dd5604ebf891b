"""Ranks that make different numbers of forwards: followed inside `follow`, errors outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.errors import Desync, UsageError
from dure.fsdp import follow, fully_shard, strategy
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

WORDS = 9


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        values = torch.arange(WORDS * WORDS).view(WORDS, WORDS) * (3 + number) % 17 - 8
        self.weight = nn.Parameter(values.float() / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


class Net(nn.Module):
    """Gives the next word; even ones skip a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WORDS)
        self.blocks = nn.ModuleList([Block(number) for number in range(3)])
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(WORDS))

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        x = self.embed(word)
        for number, block in enumerate(self.blocks):
            if number != 1 or int(word) % 2:
                x = block(x)
        return x


def sharded(way: str) -> Net:
    model = Net()
    with strategy(way):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)


def words(model: nn.Module, first: int, count: int) -> Iterator[int]:
    word = torch.tensor(first)
    for _ in range(count):
        word = model(word).argmax()
        yield int(word)


def warm(model: nn.Module) -> None:
    """All modules, on all ranks: their order."""
    model(torch.tensor(1)).sum().backward()


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (5, 0), (0, 0), (2, 6, 0, 3)])
def test_ranks_that_are_done_follow_the_others(way: str, counts: tuple[int, ...]) -> None:
    def body(rank: int) -> list[list[int]]:
        model = sharded(way)
        warm(model)
        made = []
        for turn in range(2):
            with follow(model), torch.no_grad():
                made.append(list(words(model, rank + turn, counts[rank])))
            warm(model)
        return made

    reference = Net()
    expected = [
        [list(words(reference, rank + turn, count)) for turn in range(2)]
        for rank, count in enumerate(counts)
    ]
    assert run_ranks(len(counts), body) == expected


@on_ranks(2)
def test_it_costs_one_flag_per_forward(rank: int, way: str) -> None:
    """As many as the longest has forwards, and one more to end."""

    model = sharded(way)
    warm(model)
    with CommRecorder() as seen, follow(model), torch.no_grad():
        list(words(model, 1, (1, 4)[rank]))
    flags = [e for e in seen.events if e.op == "all_gather_single" and e.nbytes == 8]
    assert len(flags) == 5


def caught(kind: type[dure.DureError], call: Any, *args: Any) -> Any:
    with pytest.raises(kind) as error, torch.no_grad():
        call(*args)
    return error.value


def outside_of_a_block(model: Any, rank: int, instead: str) -> None:
    list(words(model, 1, (1, 2)[rank]))
    if instead == "barrier":
        dure.barrier()
    else:
        dure.all_reduce(torch.ones(3))


@pytest.mark.parametrize("instead", ["barrier", "all_reduce"])
@on_ranks(2)
def test_outside_of_it_the_error_names_module_and_ranks(rank: int, way: str, instead: str) -> None:
    model = sharded(way)
    warm(model)
    error = caught(Desync, outside_of_a_block, model, rank, instead)
    assert set(error.calls) == {0, 1}
    if rank == 1:
        assert error.calls[1].endswith("for the module (root)")
        assert "follow" in error.fix


def fail(*_: object) -> None:
    raise ArithmeticError


def leave_a_forward(model: Any, rank: int) -> None:
    if rank == 0:
        handle = model.blocks[0].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(torch.tensor(1))
        handle.remove()
    for _ in range(2):
        model(torch.tensor(1))


def call_different_modules(model: Any, rank: int) -> None:
    with follow(model):
        if rank:
            model(torch.tensor(1))
        else:
            model.blocks[2](torch.ones(WORDS))


def raise_on_rank_0(model: Any, rank: int) -> None:
    with follow(model):
        for number, _ in enumerate(words(model, 1, 3)):
            if rank == 0 and number == 1:
                raise ArithmeticError


@pytest.mark.parametrize(
    ("wrong", "calls"),
    [
        (call_different_modules, ("forward of blocks.2", "forward of (root)")),
        (raise_on_rank_0, ("raised", "forward of (root)")),
    ],
)
@on_ranks(2)
def test_ranks_that_differ_are_named_with_their_modules(
    rank: int, way: str, wrong: Any, calls: Any
) -> None:
    model = sharded(way)
    warm(model)
    if wrong is raise_on_rank_0 and rank == 0:
        with pytest.raises(ArithmeticError), torch.no_grad():
            wrong(model, rank)
        return
    assert caught(Desync, wrong, model, rank).calls == dict(enumerate(calls))


@on_ranks(2)
def test_gathers_of_different_modules_are_named_also_if_they_have_as_many_bytes(rank: int) -> None:
    model = sharded("gathered")
    warm(model)
    calls = caught(Desync, leave_a_forward, model, rank).calls
    assert "(root), gathered in forward" in calls[0]
    assert "blocks.2, gathered in forward" in calls[1]


def follow_unprepared(model: Any, rank: int) -> None:
    with follow(model):
        list(words(model, 1, rank))


@on_ranks(2)
def test_misuse_is_refused(rank: int, way: str) -> None:
    error = caught(UsageError, follow_unprepared, sharded("gathered"), rank)
    assert "rank 0: no forward, and none before; rank 1: forward of (root)" in error.seen
    model = sharded(way)
    warm(model)
    with pytest.raises(UsageError, match="without gradients"), follow(model):
        model(torch.tensor(1))
    with pytest.raises(UsageError, match="within another"), follow(model), follow(model):
        pass
    warm(model)
