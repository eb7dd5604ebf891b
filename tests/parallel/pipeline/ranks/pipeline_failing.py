"""A pipeline whose stages raise, one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import PipelineError
from tests.parallel.pipeline.ranks.pipeline_models import Pipeline, Trained, batches, mse

_PHASES = [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 3)]


class _Broken(RuntimeError):
    pass


class _Faulty(nn.Module):
    """Raises in the forward, or the backward, of one microbatch of one step."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.fails_in, self.countdown = "", 0
        self.error: type[BaseException] = _Broken

    def arm(self, phase: str, microbatch: int, error: type[BaseException] = _Broken) -> None:
        self.fails_in, self.countdown, self.error = phase, microbatch, error

    def due(self, phase: str) -> bool:
        self.countdown -= self.fails_in == phase
        is_due = self.fails_in == phase and self.countdown == -1
        if is_due:
            self.fails_in = ""
        return is_due

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.due("forward"):
            raise self.error("forward")
        return _Fault.apply(self.part(x), self)


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: _Faulty) -> torch.Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.owner.due("backward"):
            raise ctx.owner.error("backward")
        return gradients[0], None


def fail_everywhere(rank: int, name: str, world: int, parts: list[nn.Module]) -> Trained:
    """Fail in one stage after another, in each phase of a step; then train."""
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
    return pipeline.train(batches(2))


def interrupt_stages(rank: int, name: str, world: int, parts: list[nn.Module]) -> Trained:
    """Interrupt one stage after another, in each phase of a step; then train."""
    pipeline = Pipeline(name, rank, world, parts, 4, wrap=_Faulty)
    x, y = batches(1)[0]
    before = pipeline.weights()
    for stage in range(len(parts)):
        for error, phase in ((KeyboardInterrupt, "forward"), (SystemExit, "backward")):
            part = pipeline.parts.get(stage)
            if isinstance(part, _Faulty):
                part.arm(phase, 1, error)
            with pytest.raises(PipelineError if part is None else error) as caught:
                pipeline.step(x, y)
            if isinstance(caught.value, PipelineError):
                assert caught.value.stage == stage
                assert error.__name__ in caught.value.remote_traceback
    assert all(torch.equal(before[name], weight) for name, weight in pipeline.weights().items())
    return pipeline.train(batches(2))
