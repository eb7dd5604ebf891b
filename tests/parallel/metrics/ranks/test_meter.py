"""The step meter and its timeline, with ranks that average gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dure as dist
from dure import trace
from dure.parallel.metrics import StepReport
from dure.testing import CommRecorder, run_ranks
from dure.trace.findings import study
from dure.trace.merging import read
from dure.trace.timeline import timeline
from tests.parallel.metrics.ranks.metered import SAMPLES, STEPS, Training


@pytest.mark.parametrize("n", [2, 3])
def test_report_compares_the_ranks_with_one_all_gather(n: int):
    def body(rank: int) -> StepReport:
        training = Training()
        training.run()  # after the first step buckets are planned again
        with CommRecorder() as seen:
            training.run()
            before = len(seen.ops)
            report = training.meter.report()
            assert seen.ops[before:] == ["all_gather"]
        assert training.meter.num_gathers == 1
        assert before == STEPS * len(training.bucket_bytes)  # measuring communicates nothing
        assert report.rank == rank
        own = training.meter.steps()
        assert [s.samples for s in own] == [SAMPLES] * 2 * STEPS
        assert own[-1].num_bytes == sum(training.bucket_bytes)
        return report

    reports = run_ranks(n, body)
    assert len(reports[0].ranks) == n
    assert all(r.ranks == reports[0].ranks and r.num_steps == 2 * STEPS for r in reports)


def test_timeline_shows_phases_and_buckets_of_2_ranks(tmp_path: Path):
    def body(_: int) -> int:
        training = Training()
        training.run()
        dist.barrier()
        with trace.record_steps(tmp_path):
            training.run()
            dist.barrier()  # no rank dumps before all have ended
        return len(training.bucket_bytes)

    buckets = run_ranks(2, body)[0]
    assert buckets > 1
    flight = read(tmp_path)
    events: list[dict[str, Any]] = timeline(flight, study(flight).groups)["traceEvents"]
    for rank in (0, 1):
        found = [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["tid"] >= 1000]
        names = [e["name"] for e in found]
        for name in ("data wait", "forward", "backward", "wait for gradients", "optimizer"):
            assert names.count(name) == STEPS, name
        first = [e for e in found if e["name"] == "bucket 0"]
        assert len(first) == STEPS
        assert first[0]["args"]["first"] in ("2.weight", "2.bias")
        # The last bucket ends when the operation did that it started, not when it was waited for.
        calls = [r.end_ns for r in flight.ranks[rank].records]
        ends = {round(flight.time_ns(rank, t) / 1000, 2) for t in calls}
        reduced = [e for e in found if e["cat"] == "buckets"]
        assert len(reduced) == buckets * STEPS
        assert {round(e["ts"] + e["dur"], 2) for e in reduced} <= ends
