"""A list of modules that are gathered together, of which a step calls some only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import CommRecorder, run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import assert_same, full_gradients, making

SIZE, WIDTH = 2, 4


class Net(nn.Module):
    """An embedding, a body, and a norm and a head that are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, words: torch.Tensor, within: bool = False) -> torch.Tensor:
        """With `within`, chunks of a loss run backward before forward has ended."""
        hidden = self.body(self.embed(words))
        for chunk in hidden.detach().split(2) if within else ():
            self.head(chunk).square().sum().backward()
        return self.norm(hidden)


def in_chunks(model: Net, words: torch.Tensor) -> None:
    """Backward of each chunk's loss frees its logits."""
    hidden = model(words)
    gradients = []
    for chunk in hidden.detach().split(2):
        chunk.requires_grad_()
        model.head(chunk).square().sum().backward()
        gradients.append(chunk.grad)
    hidden.backward(torch.cat(gradients))


def checkpointed_chunks(model: Net, words: torch.Tensor) -> None:
    hidden = model(words)
    chunks = (checkpoint(model.head, c, use_reentrant=False) for c in hidden.split(2))
    torch.cat(list(chunks)).square().sum().backward()


def chunks_within_forward(model: Net, words: torch.Tensor) -> None:
    model(words, within=True).square().sum().backward()


def norm_alone(model: Net, words: torch.Tensor) -> None:
    model(words).square().sum().backward()


def head_alone(model: Net, words: torch.Tensor) -> None:
    model.head(torch.nn.functional.one_hot(words, 6)[:, :WIDTH].double()).sum().backward()


def looks_between(model: Net, words: torch.Tensor) -> None:
    """A head that is called without gradients, before the forward and in the middle of a step."""
    with torch.no_grad():
        model.head(torch.ones(1, WIDTH, dtype=torch.double))
    hidden = model(words)
    with torch.no_grad():
        model.head(hidden)
    hidden.square().sum().backward()


def unused_forward(model: Net, words: torch.Tensor) -> None:
    """With gradients, and no backward."""
    model.head(torch.ones(1, WIDTH, dtype=torch.double))
    in_chunks(model, words)


STEPS = [
    in_chunks,
    checkpointed_chunks,
    chunks_within_forward,
    norm_alone,
    head_alone,
    looks_between,
    unused_forward,
]


def the_last_two(model: Any) -> None:
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def ends(model: Any) -> None:
    fully_shard([model.embed, model.head])
    fully_shard(model)


def as_a_root(model: Any) -> None:
    fully_shard(model.body)
    fully_shard([model.embed, model.norm, model.head])


@pytest.mark.parametrize("shard", [the_last_two, ends, as_a_root], ids=lambda f: f.__name__)
def test_gradients_are_those_of_one_process(way: str, shard: Callable[[Any], None]) -> None:
    """Each kind of step after each other one; modules have shards when it has ended."""
    with making:
        torch.manual_seed(0)
        made = Net().double()
    words = [torch.tensor([0, 3, 1, 3]), torch.tensor([5, 2, 2, 4])]

    def body(rank: int) -> None:
        model, alone = copy.deepcopy(made), copy.deepcopy(made)
        with strategy(way):
            shard(model)
        for step in STEPS + STEPS[::-1]:
            model.zero_grad()
            alone.zero_grad()
            step(model, words[rank])
            for each in words:
                step(alone, each)
            for parameter in alone.parameters():
                if parameter.grad is not None:
                    parameter.grad /= SIZE
            assert_same(full_gradients(model), full_gradients(alone))
            assert all(isinstance(p, DTensor) for p in model.parameters())

    run_ranks(SIZE, body)


def test_a_module_of_a_list_called_alone_frees_its_parameters() -> None:
    """So that whatever reads or writes parameters between steps has shards."""

    def body(rank: int) -> list[str]:
        with making:
            model: Any = Net()
        with strategy("gathered"):
            the_last_two(model)
        with torch.no_grad(), CommRecorder() as recorder:
            for _ in range(2):
                model.head(torch.ones(1, WIDTH))
                assert isinstance(model.head.weight, DTensor)
        return recorder.ops

    assert run_ranks(SIZE, body) == [["all_gather_single"] * 2] * 2
