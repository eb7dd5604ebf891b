"""A pipeline's step on the timeline, and beside what its lists take with the measured times."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dure import trace
from dure.cli.trace import commands
from dure.parallel.pipeline import executor
from dure.parallel.pipeline.messages import Messages
from dure.schedules import Action, Kind
from dure.testing import run_ranks
from dure.trace import spans
from dure.trace.merging import read
from dure.trace.pipeline_steps import measured_step
from dure.trace.timeline import timeline
from tests.parallel.pipeline.ranks.pipeline_models import Pipeline, batches, dense


def _recorded(rank: int, parts: list[nn.Module], folder: Path) -> None:
    pipeline = Pipeline("zb-v", rank, 2, parts, 4)
    for x, y in batches(2):
        pipeline.step(x, y)
    trace.dump(folder, rank=rank)


def test_steps_are_drawn_a_track_a_stage_and_simulated_on_2_ranks(tmp_path: Path):
    with trace.record_steps():
        run_ranks(2, _recorded, dense(4), tmp_path)
    flight = read(tmp_path)
    events: list[dict[str, Any]] = timeline(flight, ())["traceEvents"]
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(0, "stage 0"), (1, "stage 1"), (1, "stage 2"), (0, "stage 3")} <= tracks
    backwards = [e for e in events if e["name"] == "3W2" and e["ph"] == "X"]
    assert len(backwards) == 2 and {e["pid"] for e in backwards} == {0}

    step = measured_step(flight)
    assert step is not None and step.number == 2
    assert step.measured.schedule.placement == (0, 1, 1, 0)
    assert step.simulated.step_time > 0 and 0 <= step.measured.bubble < 1
    busy = sum(s.end - s.start for spans in step.measured.spans for s in spans)
    assert step.measured.step_time * 2 * (1 - step.measured.bubble) == pytest.approx(busy)

    drawn = tmp_path / "out.json"
    done = CliRunner().invoke(commands, ["merge", str(tmp_path), "-o", str(drawn)])
    assert done.exit_code == 0 and "simulated" in done.output and drawn.exists()


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
    take = Messages.take

    def slow_take(*args: Any) -> Any:
        CLOCK.now += 100
        return take(*args)

    monkeypatch.setattr(executor, "time", CLOCK)
    monkeypatch.setattr(Messages, "take", slow_take)
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
