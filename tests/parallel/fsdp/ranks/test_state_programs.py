"""Random programs: after each backward every parameter has the gradient that one process gives it.

A program is a model of blocks of different shapes, how it is sharded, and a loss for each step. The
same program runs on one process, unsharded, with the batches of all ranks. Where that gives a
parameter no gradient, its shard has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    """Keeps a tensor from its middle in `inside`, and its output in `kept`."""

    def __init__(self, shape: str, slope: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.shape, self.slope = shape, slope

    def forward(self, x: torch.Tensor) -> Any:
        self.inside = self.first(x)
        y = self.second(torch.tanh(self.inside))
        if self.slope and torch.is_grad_enabled() and x.requires_grad:
            (y_by_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            y = y + self.second(y_by_x)
        self.kept = SHAPES[self.shape][0](y)
        return self.kept


@dataclass(frozen=True)
class Program:
    """What `Net` and a step are drawn from."""

    shapes: list[str]
    writes: list[int | None]
    slopes: list[bool]
    checkpoints: list[bool]
    frozen: list[bool]
    sharded: list[bool]
    frees: bool | None
    returns: str
    losses: list[str]
    set_to_none: bool

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)
        blocks = range(draw.randint(1, 3))
        slopes = [draw.random() < 0.2 for _ in blocks]
        sharded = [draw.random() < 0.7 for _ in blocks]
        return cls(
            shapes=[draw.choice(list(SHAPES)) for _ in blocks],
            writes=[draw.choice([None, 0, 1, 2]) for _ in blocks],
            slopes=slopes,
            checkpoints=[
                own and not slope and draw.random() < 0.2
                for own, slope in zip(sharded, slopes, strict=True)
            ],
            frozen=[draw.random() < 0.2 for _ in blocks],
            sharded=sharded,
            frees=draw.choice([None, False]),
            returns=draw.choice(["tensor", "box", "nothing"]),
            losses=[draw.choice(list(LOSSES)) for _ in range(STEPS)],
            set_to_none=draw.random() < 0.5,
        )


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.position = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(map(Block, program.shapes, program.slopes))
        self.head = nn.Linear(WIDTH, 2)
        for block, frozen in zip(self.blocks, program.frozen, strict=True):
            block.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.begin = x + self.position
        program = self.program
        each = zip(self.blocks, program.shapes, program.writes, program.checkpoints, strict=True)
        for block, shape, write, again in each:
            out = checkpoint(block, x, use_reentrant=False) if again else block(x)
            x = SHAPES[shape][1](out)
            if write is not None:
                WRITES[write](x)
            self.last = x
        self.out = self.head(x)
        return {"tensor": self.out, "box": Box(self.out), "nothing": None}[program.returns]


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
    inside = model.blocks[0].inside if not model.program.checkpoints[0] else model.begin
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


LOSSES = {
    f.__name__: f
    for f in (
        backward_of_output,
        backward_of_a_feature,
        backward_of_the_beginning,
        backward_of_both,
        two_backwards,
        two_forwards,
        penalty,
        penalty_and_loss,
        a_look_at_slopes,
    )
}


def made(program: Program) -> Net:
    with making:
        torch.manual_seed(3)
        return Net(program).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def shard(model: Net, **options: Any) -> None:
    """Shard a model, and the blocks that the program says."""
    program = model.program
    for block, sharded in zip(model.blocks, program.sharded, strict=True):
        if sharded:
            fully_shard(block, reshard_after_forward=program.frees, **options)
    fully_shard(model, **options)


def gradients(program: Program, model: Net, ranks: Iterable[int]) -> list[Tensors]:
    """Return the gradients of each step on the batches of `ranks`."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, loss in enumerate(program.losses):
        optimizer.zero_grad(program.set_to_none)
        for rank in ranks:
            LOSSES[loss](model, batch(step, rank))
        for parameter in model.parameters() if ranks is RANKS else ():
            if parameter.grad is not None:
                parameter.grad /= len(RANKS)
        named = full_gradients(model).items()
        found.append({name: None if g is None else g.clone() for name, g in named})
        optimizer.step()
    return found


def test_gradients_of_random_programs_are_those_of_one_process(way: str) -> None:
    programs = [Program.drawn(seed) for seed in PROGRAMS]
    expected = [gradients(program, made(program), RANKS) for program in programs]

    def body(rank: int) -> None:
        for program, wanted in zip(programs, expected, strict=True):
            model = made(program)
            with strategy(way):
                shard(model)
            try:
                for found, each in zip(gradients(program, model, [rank]), wanted, strict=True):
                    assert_same(found, each)
            except BaseException as error:
                error.add_note(str(program))
                raise

    run_ranks(len(RANKS), body)
