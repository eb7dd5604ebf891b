"""Two models on one group of ranks: none waits for the other, or makes its saved values stale."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dure
from dure.fsdp import fully_shard, strategy
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import assert_same, full_weights, making
from tests.thread_ranks import on_ranks

SIZE, STEPS, WIDTH = 2, 3, 4
Step = Callable[["Pair", torch.Tensor], None]


class Adapted(nn.Module):
    """A frozen layer with two low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return self.base(x) + getattr(self, side)(x)


class Pair(nn.Module):
    """Two networks, and a block with two adapters; each part has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.b = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.block = Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.block(x, "left")

    def give_optimizers(self) -> None:
        parts = {"a": self.a, "b": self.b, "left": self.block.left, "right": self.block.right}
        self.optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in parts.items()}

    def learn(self, part: str, loss: torch.Tensor) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.averaged(parameter.grad)
        self.optimizers[part].step()

    def averaged(self, gradient: torch.Tensor) -> None:
        """Replaced where ranks have whole gradients of their own."""


def generator_and_critic(pair: Pair, x: torch.Tensor) -> None:
    """A step of `b` between forward and backward of `a`."""
    fake = pair.a(x)
    pair.learn("b", pair.b(fake.detach()).square().mean() - pair.b(x).mean())
    pair.learn("a", pair.b(fake).square().mean())


def actor_and_critic(pair: Pair, x: torch.Tensor) -> None:
    """Both forwards, then each its backward and step."""
    actor, critic = pair.a(x).log_softmax(-1), pair.b(x)
    pair.learn("a", (actor * (x - critic).detach()).mean())
    pair.learn("b", (critic - x).square().mean())


def teacher_and_student(pair: Pair, x: torch.Tensor) -> None:
    """The teacher runs with gradients on; no backward follows, and it takes the student's mean."""
    taught = pair.b(x)
    pair.learn("a", (pair.a(x) - taught.detach()).square().mean())
    pair.learn("b", (pair.b(x) - pair.a(x).detach()).square().mean())


def two_adapters(pair: Pair, x: torch.Tensor) -> None:
    """The step of one adapter lies between forward and backward of the other."""
    left, right = pair.block(x, "left"), pair.block(x, "right")
    pair.learn("left", left.square().mean())
    pair.learn("right", right.square().mean())


KINDS: list[Step] = [generator_and_critic, actor_and_critic, teacher_and_student, two_adapters]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.double)


def train(pair: Pair, run: Step, rank: int, under_a_root: bool) -> None:
    pair.give_optimizers()
    for step in range(STEPS):
        if under_a_root and step == 1:
            pair(batch(step, rank))  # from now on both are children of one root
        run(pair, batch(step, rank))


@pytest.mark.parametrize("under_a_root", [False, True], ids=["apart", "children"])
@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.__name__)
def test_two_models_train_as_replicas_do(way: str, run: Step, under_a_root: bool) -> None:
    with making:
        torch.manual_seed(0)
        made = Pair().double()

    def body(rank: int) -> None:
        replica, pair = copy.deepcopy(made), copy.deepcopy(made)
        replica.averaged = lambda g: dure.all_reduce(g, op=dure.ReduceOp.AVG)  # pyright: ignore
        train(replica, run, rank, under_a_root)
        with strategy(way):
            for part in (pair.a[0], pair.a, pair.b, pair.block):
                fully_shard(part)
            if under_a_root:
                fully_shard(pair)
        train(pair, run, rank, under_a_root)
        assert_same(full_weights(pair), full_weights(replica))

    run_ranks(SIZE, body)


@on_ranks(SIZE)
def test_a_new_model_waits_for_no_reader_of_another(rank: int, way: str) -> None:
    """Of its one row only rank 0 has something to write."""

    with making:
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    with strategy(way):
        fully_shard(first)
        first(torch.ones(2, 3))  # with gradients; no backward follows
        fully_shard(second)
    dure.barrier()
    second.load_state_dict(second.state_dict())
    second(torch.ones(2, 3)).sum().backward()
    assert second.weight.grad is not None


class Slow(nn.Module):
    """Looks at its weight before and after another model has run."""

    def __init__(self, other: nn.Module, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, WIDTH))
        self.delays = random.Random(rank)
        self.others = [other]  # not a module within
        self.expected = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            assert set(self.weight.flatten().tolist()) == {self.expected}
            self.others[0](x)
            time.sleep(self.delays.choice([0, 0.002, 0.004]))
        assert set(self.weight.flatten().tolist()) == {self.expected}
        return x @ self.weight.t()


@on_ranks(SIZE)
def test_the_end_of_a_model_within_anothers_forward_is_not_the_others_end(rank: int) -> None:
    """Ranks that are done with the outer model's forward write it; slower ones still read it."""

    with making:
        inner = nn.Linear(WIDTH, WIDTH)
    outer = Slow(inner, rank)
    with strategy("shared"):
        fully_shard(inner)
        fully_shard(outer)
    for step in range(1, 12):
        with torch.no_grad():
            outer(torch.ones(1, WIDTH))
            outer.weight.fill_(float(step))
        outer.expected = float(step)
