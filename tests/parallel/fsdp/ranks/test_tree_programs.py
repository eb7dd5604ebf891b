"""Random programs: after each backward every parameter has the gradient that one process gives it.

A program is a model of blocks of different shapes, how it is sharded, and a loss for each step. The
same program runs on one process, unsharded, with the batches of all ranks. Where that gives a
parameter no gradient, its shard has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.fsdp import fully_shard, strategy
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import Tensors, assert_same, full_gradients, making

WIDTH, ROWS, STEPS = 4, 3, 3
RANKS, PROGRAMS = range(2), range(12)


class Box:
    """An object of a class that nothing knows how to look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def as_view(y: torch.Tensor) -> torch.Tensor:
    return y.view(-1, 2, 2).flatten(1)


def as_part(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y, y], dim=1)[:, 2:6]


def as_row(y: torch.Tensor) -> torch.Tensor:
    return y.unsqueeze(0)[0]


SHAPES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "plain": (lambda y: y, lambda out: out),
    "view": (as_view, lambda out: out),
    "part": (as_part, lambda out: out),
    "row": (as_row, lambda out: out),
    "tuple": (lambda y: (y, None), lambda out: out[0]),
    "mapping": (lambda y: {"y": y, "n": 3}, lambda out: out["y"]),
    "box": (Box, lambda out: out.value),
    "beside a box": (lambda y: (y.detach(), Box(y)), lambda out: out[1].value),
}
"""What a block returns, and how its caller takes the tensor out of it."""
WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda y: y.add_(1.0),
    lambda y: y.mul_(2.0),
    lambda y: y.masked_fill_(y > 1, 0.5),
]
"""What the caller writes into it."""


class Block(nn.Module):
    """Keeps a tensor from its middle in `inside`, its output in `kept`. What it does is drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.returned, self.taken = SHAPES[draw.choice(list(SHAPES))]
        self.write = draw.choice([None, *WRITES])
        self.slope, self.is_sharded = draw.random() < 0.2, draw.random() < 0.7
        self.is_recomputed = self.is_sharded and not self.slope and draw.random() < 0.2
        self.requires_grad_(draw.random() > 0.2)

    def forward(self, x: torch.Tensor) -> Any:
        self.inside = self.first(x)
        y = self.second(torch.tanh(self.inside))
        if self.slope and torch.is_grad_enabled() and x.requires_grad:
            (y_by_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            y = y + self.second(y_by_x)
        self.kept = self.returned(y)
        return self.kept


class Net(nn.Module):
    """A model, and how it is sharded and trained, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.position = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(Block(draw) for _ in range(draw.randint(1, 3)))
        self.head = nn.Linear(WIDTH, 2)
        self.frees, self.set_to_none = draw.choice([None, False]), draw.random() < 0.5
        self.returns = draw.choice([lambda out: out, Box, lambda out: None])
        self.losses = [draw.choice(LOSSES) for _ in range(STEPS)]

    def forward(self, x: torch.Tensor) -> Any:
        x = self.begin = x + self.position
        for block in cast(list[Any], self.blocks):
            out = checkpoint(block, x, use_reentrant=False) if block.is_recomputed else block(x)
            x = block.taken(out)
            if block.write is not None:
                block.write(x)
            self.last = x
        self.out = self.head(x)
        return self.returns(self.out)


def backward_of_output(model: Net, x: torch.Tensor) -> None:
    model(x)
    model.out.square().mean().backward()


def backward_of_a_feature(model: Net, x: torch.Tensor) -> None:
    model(x)
    model.last.square().mean().backward()


def backward_of_the_beginning(model: Net, x: torch.Tensor) -> None:
    model(x)
    model.begin.square().mean().backward()


def backward_of_both(model: Net, x: torch.Tensor) -> None:
    model(x)
    block: Any = model.blocks[0]
    inside = model.begin if block.is_recomputed else block.inside
    (model.out.square().mean() + inside.square().mean()).backward()


def two_backwards(model: Net, x: torch.Tensor) -> None:
    model(x)
    model.out.square().mean().backward(retain_graph=True)
    (model.last.square().mean() + model.out.sum()).backward()


def two_forwards(model: Net, x: torch.Tensor) -> None:
    model(x)
    first = model.out
    model(x * 2)
    (first.square().mean() + model.last.square().mean()).backward()


def penalty(model: Net, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x)
    (slope,) = torch.autograd.grad(model.out.sum(), x, create_graph=True)
    slope.square().mean().backward()


def penalty_and_loss(model: Net, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x)
    out = model.out
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    model(x.detach() * 2)
    (slope.square().mean() + out.square().mean() + model.out.sum()).backward()


def a_look_at_slopes(model: Net, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x)
    torch.autograd.grad(model.last.sum(), x, retain_graph=True)
    model.out.square().mean().backward()


LOSSES = [
    backward_of_output,
    backward_of_a_feature,
    backward_of_the_beginning,
    backward_of_both,
    two_backwards,
    two_forwards,
    penalty,
    penalty_and_loss,
    a_look_at_slopes,
]


def made(seed: int) -> Net:
    with making:
        torch.manual_seed(3)
        return Net(seed).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def gradients(model: Net, ranks: Iterable[int]) -> list[Tensors]:
    """Return the gradients of each step on the batches of `ranks`."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, loss in enumerate(model.losses):
        optimizer.zero_grad(model.set_to_none)
        for rank in ranks:
            loss(model, batch(step, rank))
        for parameter in model.parameters() if ranks is RANKS else ():
            if parameter.grad is not None:
                parameter.grad /= len(RANKS)
        named = full_gradients(model).items()
        found.append({name: None if g is None else g.clone() for name, g in named})
        optimizer.step()
    return found


def test_gradients_of_random_programs_are_those_of_one_process(way: str) -> None:
    expected = [gradients(made(seed), RANKS) for seed in PROGRAMS]

    def body(rank: int) -> None:
        for seed, wanted in zip(PROGRAMS, expected, strict=True):
            model = made(seed)
            with strategy(way):
                for block in filter(lambda b: b.is_sharded, model.blocks):
                    fully_shard(block, reshard_after_forward=model.frees)
                fully_shard(model)
            try:
                for found, each in zip(gradients(model, [rank]), wanted, strict=True):
                    assert_same(found, each)
            except BaseException as error:
                error.add_note(f"seed {seed}: {[loss.__name__ for loss in model.losses]}")
                raise

    run_ranks(len(RANKS), body)
