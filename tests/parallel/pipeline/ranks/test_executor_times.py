"""How long an action of a pipeline lasts."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from dure import trace
from dure.parallel.pipeline import executor
from dure.parallel.pipeline.messages import StageTransfers
from dure.schedules import Action, Kind
from dure.testing import run_ranks
from dure.trace import spans
from tests.parallel.pipeline.ranks.pipeline_models import Pipeline, batches


class _Clock(threading.local):
    """A rank's clock, which advances only when a test advances it."""

    now = 0

    def monotonic_ns(self) -> int:
        return self.now


class _Slow(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        CLOCK.now += 10
        return super().forward(input)


CLOCK = _Clock()


def test_an_action_lasts_as_long_as_it_computes_and_does_not_wait(monkeypatch: Any):
    """Also one of two parts, of which the second waits when the first has been computed."""
    take = StageTransfers.take

    def slow_take(*args: Any) -> Any:
        CLOCK.now += 100
        return take(*args)

    monkeypatch.setattr(executor, "time", CLOCK)
    monkeypatch.setattr(StageTransfers, "take", slow_take)
    kept: list[trace.Span] = []
    monkeypatch.setattr(spans, "listeners", [kept.append])

    def step(rank: int) -> None:
        Pipeline("dualpipe-v", rank, 2, [_Slow(6, 6).double() for _ in range(4)], 4).step(
            *batches(1)[0]
        )

    run_ranks(2, step)
    lasted = {(Action.parse(s.name).kind, s.end_ns - s.start_ns) for s in kept}
    assert {k: t for k, t in lasted if k in (Kind.FORWARD, Kind.OVERLAP_F_B)} == {
        Kind.FORWARD: 10,
        Kind.OVERLAP_F_B: 10,
    }
    assert (Kind.FULL_BACKWARD, 0) in lasted and {t for _, t in lasted} == {0, 10}
