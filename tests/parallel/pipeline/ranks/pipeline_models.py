"""Models in parts, and pipelines of them, for the tests of pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dure.pipelining as pp

Trained = tuple[list[list[float]], dict[str, torch.Tensor]]
"""The losses of each step, where they are known, and the weights."""
CPU = torch.device("cpu")
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (pp.ScheduleGPipe, 1),
    "1f1b": (pp.Schedule1F1B, 1),
    "interleaved": (pp.ScheduleInterleaved1F1B, 2),
    "bfs": (pp.ScheduleLoopedBFS, 2),
    "zero-bubble": (pp.ScheduleInterleavedZeroBubble, 2),
    "zb-v": (pp.ScheduleZBVZeroBubble, 2),
    "dualpipe-v": (pp.ScheduleDualPipeV, 2),
}
V_SHAPED = ("zb-v", "dualpipe-v")


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def stages_of(name: str, rank: int, world: int, each: int) -> list[int]:
    """Return the stages of a rank."""
    if name in V_SHAPED:
        return [rank, 2 * world - 1 - rank]
    return [rank + k * world for k in range(each)]


def dense(num: int, width: int = 6) -> list[nn.Module]:
    """Return parts with a weight that is used twice, a norm, and a bias that meets no input."""
    parts: list[nn.Module] = [Dense(width).double() for _ in range(num)]
    generator = torch.Generator().manual_seed(5)  # thread-ranks share torch's own
    for part in parts:
        for name, parameter in part.named_parameters():
            if not name.startswith("norm"):
                nn.init.normal_(parameter, std=1 / 3, generator=generator)
    return parts


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.twice = nn.Parameter(torch.zeros(width, width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.linear(x @ self.twice)) @ self.twice)
        return x + self.shift.exp()


class Pipeline:
    """This rank's stages of a model in parts, with a schedule, and an optimizer."""

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        parts: Sequence[nn.Module],
        microbatches: int,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = mse,
        wrap: Callable[[nn.Module], nn.Module] = lambda part: part,
        group: Any = None,
        tied: dict[int, dict[str, str]] | None = None,
        device: torch.device = CPU,
        **kwargs: Any,
    ) -> None:
        kind, each = SCHEDULES[name]
        mine = stages_of(name, rank, world, each)
        self.parts = copy.deepcopy({i: parts[i] for i in mine})  # shared parameters stay shared
        self.parts = {i: wrap(part) for i, part in self.parts.items()}
        self.stages = [
            pp.PipelineStage(
                self.parts[i], i, len(parts), device, group=group, tied=(tied or {}).get(i)
            )
            for i in mine
        ]
        one = self.stages if each > 1 else self.stages[0]
        self.schedule = kind(one, microbatches, loss_fn=loss_fn, **kwargs)
        self.has_first, self.has_last = 0 in mine, len(parts) - 1 in mine
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def parameters(self) -> list[nn.Parameter]:
        return list({p: None for part in self.parts.values() for p in part.parameters()})

    def step(self, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        """Train on a batch; return the losses, where they are known."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        args = [x] if self.has_first else []
        output = self.schedule.step(*args, target=y, losses=losses)
        assert (output is not None) == self.has_last
        self.optimizer.step()
        return [loss.item() for loss in losses]

    def eval(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.schedule.eval(*([x] if self.has_first else []))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters().items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.named_parameters().items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters by stage and name, whatever a part was wrapped in."""
        return {
            f"{i}.{name}".replace(".part.", "."): p
            for i, part in self.parts.items()
            for name, p in part.named_parameters()
        }

    def train(self, steps: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Trained:
        return [self.step(x, y) for x, y in steps], self.weights()


def one_process(
    parts: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor] = mse,
) -> Trained:
    """Train on one rank."""
    parts = copy.deepcopy(list(parts))
    parameters = {p: None for part in parts for p in part.parameters()}
    optimizer = torch.optim.SGD(list(parameters), lr=0.1)
    losses_of_steps: list[list[float]] = []
    for x, y in batches:
        optimizer.zero_grad()
        losses: list[float] = []
        for a, b in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            output: Any = a
            for part in parts:
                output = part(*output) if isinstance(output, tuple) else part(output)
            loss = loss_fn(output, b)
            (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        losses_of_steps.append(losses)
    weights = {
        f"{i}.{name}": p.detach()
        for i, part in enumerate(parts)
        for name, p in part.named_parameters()
    }
    return losses_of_steps, weights


def gradients_alone(
    model: nn.Module, steps: Sequence[tuple[torch.Tensor, torch.Tensor]], microbatches: int
) -> dict[str, torch.Tensor]:
    """Return the gradients of one rank, added up over steps."""
    for x, y in steps:
        for a, b in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            (mse(model(a), b) / microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare gradients of some of the parameters."""
    wanted = {name: expected[name] for name in found}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def batches(steps: int, rows: int = 11, width: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    both = torch.randn(steps, 2, rows, width, dtype=torch.float64, generator=generator)
    return [(x, y) for x, y in both]


def verify_same(found: Sequence[Trained], expected: Trained) -> None:
    """Compare what ranks find with one process: to rounding, which is of the order 1e-15."""
    losses = next(each for each, _ in found if each and each[0])
    torch.testing.assert_close(losses, expected[0], rtol=0, atol=1e-12)
    weights = {name: value for _, each in found for name, value in each.items()}
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- what travels between stages


class Nested(nn.Module):
    """Hands on a nested structure, with None, a number, integers, another dtype and a skip."""

    def __init__(self, index: int, num: int) -> None:
        super().__init__()
        self.index, self.num = index, num
        self.linear = nn.Linear(6, 6).double()
        self.low = nn.Linear(6, 6)

    def forward(self, state: Any, nothing: None = None, skip: torch.Tensor | None = None) -> Any:
        x = state["x"] if isinstance(state, dict) else state
        if isinstance(state, dict):
            assert nothing is None and state["depth"] == self.index
            assert state["ids"].dtype == torch.int64 and not state["ids"].requires_grad
        first = x if skip is None else skip
        x = self.linear(x) + self.low(x.float()).double()
        if self.index == self.num - 1:
            return x + first
        ids = torch.arange(len(x))
        return {"x": x, "depth": self.index + 1, "ids": ids}, None, first * 1


def of_nested(rank: int, name: str, world: int, parts: list[nn.Module]) -> Trained:
    return Pipeline(name, rank, world, parts, 4).train(batches(2))


STEADY, OTHER = [4, 4, 4], [2, 5, 3]
LENGTHS = [STEADY, STEADY, OTHER, OTHER, OTHER, STEADY, [1, 0, 7], STEADY]


def of_lengths(rank: int, parts: list[nn.Module], steps: list[list[int]]) -> list[list[float]]:
    pipeline = Pipeline("1f1b", rank, 2, parts, 3)
    found = []
    for lengths in steps:
        generator = torch.Generator().manual_seed(sum(lengths))
        data = [torch.randn(n, 6, generator=generator).double() for n in lengths]
        losses: list[torch.Tensor] = []
        outputs = pipeline.schedule.step_microbatches(
            [(x,) for x in data] if rank == 0 else None,
            None,
            [x.sin() for x in data] if rank == 1 else None,
            losses,
        )
        if rank == 1:
            assert outputs is not None and [len(x) for x in outputs] == lengths
        found.append([loss.item() for loss in losses])
    return found
