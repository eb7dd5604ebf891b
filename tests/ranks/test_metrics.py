"""The step meter, its timeline and its TensorBoard files, with ranks that average gradients."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure import trace
from dure.errors import UsageError
from dure.parallel.metrics import StepReport
from dure.testing import CommRecorder, run_ranks
from dure.trace.findings import study
from dure.trace.merging import read
from dure.trace.timeline import timeline

STEPS, SAMPLES = 4, 3


class Training:
    """A small DDP model, its optimizer and a meter around both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 8))
        self.ddp = dist.DistributedDataParallel(net, bucket_cap_mb=0.005)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.meter = dist.StepMeter(self.ddp, self.optimizer)

    def run(self, accumulate: int = 1, board: dist.TensorBoardWriter | None = None) -> None:
        batches = torch.ones(STEPS * accumulate, SAMPLES, 8)
        for number, x in enumerate(self.meter.batches(batches), 1):
            if number % accumulate:
                with self.ddp.no_sync():
                    self.ddp(x).sum().backward()
                continue
            self.ddp(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if board is not None:
                board.write(loss=float(number))


@pytest.mark.parametrize("n", [2, 3])
def test_report_compares_the_ranks_with_one_all_gather(n: int):
    def body(rank: int) -> StepReport:
        training = Training()
        training.run()  # after the first step buckets are made anew
        with CommRecorder() as seen:
            training.run()
            before = len(seen.ops)
            report = training.meter.report()
            assert seen.ops[before:] == ["all_gather"]
        assert training.meter.num_gathers == 1
        buckets = training.ddp.reducer.buckets
        assert before == STEPS * len(buckets)  # measuring communicates nothing
        assert training.meter.last.num_bytes == sum(b.num_bytes for b in buckets)
        assert report.rank == rank
        return report

    reports = run_ranks(n, body)
    assert len(reports[0].ranks) == n
    assert all(r.ranks == reports[0].ranks and r.num_steps == 2 * STEPS for r in reports)
    for split in reports[0].ranks:
        assert split.samples == SAMPLES
        assert split.exposed_comm_s > 0 and split.forward_s > 0 and split.optimizer_s > 0
        assert sum(split.phases().values()) >= split.total_s * 0.999


def test_accumulation_counts_the_reduction_once_2_ranks():
    def body(_: int) -> None:
        training = Training()
        training.run(accumulate=3)
        steps = training.meter.steps()
        assert [s.samples for s in steps] == [3 * SAMPLES] * STEPS
        reduced = sum(b.num_bytes for b in training.ddp.reducer.buckets)
        assert [s.num_bytes for s in steps][1:] == [reduced] * (STEPS - 1)
        assert all(s.exposed_comm_s < s.total_s for s in steps)

    run_ranks(2, body)


def test_timeline_shows_phases_and_buckets_of_2_ranks(tmp_path: Path):
    def body(_: int) -> int:
        training = Training()
        training.run()
        dist.barrier()
        with trace.record_steps(tmp_path):
            training.run()
            dist.barrier()  # nobody dumps before all have ended
        return len(training.ddp.reducer.buckets)

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
        assert first[0]["args"]["first"] == "2.weight" or first[0]["args"]["first"] == "2.bias"
        assert first[0]["args"]["bytes"] > 0
        # The last bucket ends when the operation did that it started, not when it was waited for.
        calls = [r.end_ns for r in flight.ranks[rank].records]
        ends = {round(flight.time_ns(rank, t) / 1000, 2) for t in calls}
        travelled = [e for e in found if e["cat"] == "buckets"]
        assert len(travelled) == buckets * STEPS
        assert {round(e["ts"] + e["dur"], 2) for e in travelled} <= ends


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files."""
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


NAMES = {"step/compute_s", "step/exposed_comm_s", "step/data_wait_s", "samples/s", "loss"}


def test_tensorboard_gets_the_means_of_2_ranks_from_rank_0(tmp_path: Path):
    def body(_: int) -> None:
        training = Training()
        with dist.TensorBoardWriter(tmp_path, training.meter, every=2) as board:
            training.run(board=board)
        assert training.meter.num_gathers == STEPS // 2

    run_ranks(2, body)
    assert len(list(tmp_path.iterdir())) == 1
    found = scalars(tmp_path)
    assert found.keys() >= NAMES
    assert [step for step, _ in found["step/compute_s"]] == [2, 4]
    assert found["loss"] == [(2, 2.0), (4, 4.0)]
    assert all(value > 0 for _, value in found["samples/s"])


def test_tensorboard_of_each_of_2_ranks_needs_no_communication(tmp_path: Path):
    def body(_: int) -> None:
        training = Training()
        with dist.TensorBoardWriter(tmp_path, training.meter, every=4, per_rank=True) as board:
            training.run(board=board)
        assert training.meter.num_gathers == 0

    run_ranks(2, body)
    for rank in (0, 1):
        found = scalars(tmp_path / f"rank{rank}")
        assert found.keys() >= NAMES
        assert len(found["step/total_s"]) == 1


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    def missing(name: str) -> object:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("dure.parallel.metrics.board.importlib.import_module", missing)
    with pytest.raises(UsageError) as caught:
        dist.TensorBoardWriter(tmp_path / "new", dist.StepMeter())
    assert "'.[tensorboard]'" in caught.value.fix
    assert not (tmp_path / "new").exists()


def test_a_dump_holds_spans_of_recorded_steps_alone(tmp_path: Path):
    def body(_: int) -> None:
        training = Training()
        training.run()
        with trace.record_steps():
            pass
        trace.dump(tmp_path)

    run_ranks(1, body)
    assert json.loads((tmp_path / "rank0.json").read_text())["spans"] == []
