"""A pipeline's step on the timeline, and beside what its lists take with the measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from dure import trace
from dure.cli.trace import commands
from dure.testing import run_ranks
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
    events: list[dict[str, Any]] = timeline(flight)["traceEvents"]
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
