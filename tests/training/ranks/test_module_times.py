"""What a step of a sharded model waited for: by module, in StepMeter's report, as spans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.testing import run_ranks
from dure.trace import spans
from tests.parallel.fsdp.ranks.fsdp_models import BOTH_WAYS, by_parts
from tests.thread_ranks import on_ranks

pytestmark = BOTH_WAYS


def sharded(way: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    return by_parts(way, model, model[0], model[1])


def step(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


@on_ranks(2)
def test_the_meter_reports_them(rank: int, way: str) -> None:
    model = sharded(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = dure.StepMeter(model, optimizer)
    for _ in range(4):
        with meter.step(3):
            step(model)
            optimizer.step()
    mine = meter.last
    assert mine.exposed_comm_s == pytest.approx(model.step_times.exposed_comm_s, abs=1e-6)
    assert mine.num_bytes == model.step_times.num_bytes
    parts = mine.compute_s + mine.exposed_comm_s + mine.data_wait_s
    assert parts <= mine.total_s
    assert mine.forward_s > 0
    report = meter.report()
    assert set(report.modules) == {"(root)", "0", "1"}
    assert report.modules["1"].reduce_s > 0
    rows = [" ".join(line.split()) for line in str(report).splitlines()]
    assert f"modules of rank {rank} gathered ahead waited for reduce" in rows
    assert [row.split()[0] for row in rows[-3:]] == ["(root)", "0", "1"]


def test_a_timeline_shows_them(way: str) -> None:
    seen: list[spans.Span] = []

    def body(rank: int) -> None:
        model = sharded(way)
        step(model)
        dure.barrier()
        if rank == 0:
            spans.listeners.append(seen.append)
        dure.barrier()
        step(model)
        dure.barrier()
        if rank == 0:
            spans.listeners.remove(seen.append)

    run_ranks(2, body)
    for rank in (0, 1):
        mine = [span for span in seen if span.global_rank == rank]
        phases = [span for span in mine if span.track == spans.STEP]
        assert [span.name for span in phases] == ["forward", "backward", "wait for gradients"]
        assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(phases))
        names = sorted(span.name for span in mine if span.track == spans.MODULES)
        # In forward and again in backward, but for the root, which keeps its own.
        gathered = ["unshard (root)", *["unshard 0"] * 2, *["unshard 1"] * 2]
        reduced = ["reduce (root)", "reduce 0", "reduce 1"]
        assert names == reduced + (gathered if way == "gathered" else [])
        waits = sorted(span.name for span in mine if span.track == spans.WAITS)
        assert [name for name in waits if name != "other ranks"] == names
        assert all(phases[0].start_ns <= s.start_ns <= s.end_ns for s in mine)
