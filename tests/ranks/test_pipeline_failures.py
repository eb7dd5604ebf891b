"""What happens where a stage raises: all ranks raise the same, and the next step works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure.pipelining as pp
from dure.errors import PipelineError
from dure.testing import run_ranks
from ranks.pipeline_models import SCHEDULES, Pipeline, batches, dense, mse, one_process, verify_same


class _Broken(RuntimeError):
    pass


class _Faulty(nn.Module):
    """Raises in the forward, or the backward, of one microbatch of one step."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.fails_in, self.countdown = "", 0

    def arm(self, phase: str, microbatch: int) -> None:
        self.fails_in, self.countdown = phase, microbatch

    def due(self, phase: str) -> bool:
        self.countdown -= self.fails_in == phase
        is_due = self.fails_in == phase and self.countdown == -1
        if is_due:
            self.fails_in = ""
        return is_due

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.due("forward"):
            raise _Broken("forward")
        return _Fault.apply(self.part(x), self)


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: _Faulty) -> torch.Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.owner.due("backward"):
            raise _Broken("backward")
        return gradients[0], None


def fail_everywhere(rank: int, name: str, world: int, parts: list[nn.Module]) -> Any:
    """Fail in every stage by turns, in the phases of a step; then train."""
    armed: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if armed and armed.pop() == 0:
            raise _Broken("loss")
        return mse(output, target)

    pipeline = Pipeline(name, rank, world, parts, 4, loss_fn=loss_fn, wrap=_Faulty)
    pipeline.optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.0)
    x, y = batches(1)[0]
    cases = [(stage, p, m) for stage in range(len(parts)) for p, m in _PHASES]
    for step, (stage, phase, microbatch) in enumerate(cases):
        if step % 3 == 0:
            pipeline.step(x, y)  # so that layouts are expected, or are not
        part = pipeline.parts.get(stage)
        if isinstance(part, _Faulty):
            part.arm(phase, microbatch)
        with pytest.raises(PipelineError) as caught:
            pipeline.step(x, y)
        error = caught.value
        kind = "F" if phase == "forward" else "BIW"
        assert error.stage == stage and error.microbatch == microbatch
        assert error.action[1] in kind and error.action[0] == str(stage)
        assert f"_Broken: {phase}" in error.remote_traceback and f"{phase}" in str(error)
        assert isinstance(error.__cause__, _Broken) == (part is not None)
        assert error.peer == (rank if part is not None else error.peer)
    armed[:] = [0] if pipeline.has_last else []
    with pytest.raises(PipelineError) as caught:
        pipeline.step(x, y)
    assert caught.value.action == f"{len(parts) - 1}F0"
    pipeline.optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    losses = [pipeline.step(x, y) for x, y in batches(2)]
    weights = {name.replace(".part.", "."): w for name, w in pipeline.weights().items()}
    return losses, weights


_PHASES = [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 3)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "zb-v"])
def test_a_stage_that_raises_is_told_on_all_ranks_and_the_next_step_works(name: str):
    world = 3 if SCHEDULES[name][1] == 1 else 2
    parts = dense(world * SCHEDULES[name][1])
    found = run_ranks(world, fail_everywhere, name, world, parts, eager_bytes=0)
    verify_same(found, one_process(parts, batches(2), 4))


def _watch(rank: int, make: Callable[[], list[nn.Module]], options: pp.PipelineOptions) -> str:
    pipeline = Pipeline("1f1b", rank, 2, make(), 4, options=options)
    x, y = batches(1)[0]
    x = x.clone()
    x[5] = float("nan")  # of the second microbatch
    if not options.nan_watch:
        pipeline.step(x, y)
        return ""
    with pytest.raises(PipelineError, match="FloatingPointError") as caught:
        pipeline.step(x, y)
    return caught.value.action


def test_nan_watch_names_stage_and_microbatch_on_2_ranks():
    watched = run_ranks(2, _watch, lambda: dense(2), pp.PipelineOptions(nan_watch=True))
    assert watched == ["0F1", "0F1"]
    assert run_ranks(2, _watch, lambda: dense(2), pp.PipelineOptions()) == ["", ""]
