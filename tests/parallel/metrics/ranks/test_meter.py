"""The step meter, its timeline and its TensorBoard files, with ranks that average gradients."""

from __future__ import annotations

import gc
import importlib
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

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets, the bitmap of used parameters included."""
        return [bucket.num_bytes for bucket in self.ddp.reducer.buckets]

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


NAMES = {"step/compute_s", "step/exposed_comm_s", "step/data_wait_s", "samples/s", "loss"}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files."""
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("per_rank", [False, True])
def test_tensorboard_gets_the_means_of_2_ranks_or_each_rank_writes_its_own(
    tmp_path: Path, per_rank: bool
):
    def body(_: int) -> int:
        training = Training()
        with dist.TensorBoardWriter(tmp_path, training.meter, every=2, per_rank=per_rank) as board:
            training.run(board=board)
        return training.meter.num_gathers

    assert run_ranks(2, body) == [0 if per_rank else STEPS // 2] * 2
    folders = [tmp_path / f"rank{rank}" for rank in (0, 1)] if per_rank else [tmp_path]
    for folder in folders:
        assert len(list(folder.iterdir())) == 1
        found = scalars(folder)
        assert found.keys() >= NAMES
        assert [step for step, _ in found["step/compute_s"]] == [2, 4]
        assert found["loss"] == [(2, 2.0), (4, 4.0)]


def test_what_was_written_is_in_the_file_although_it_was_not_closed(tmp_path: Path):
    board = dist.TensorBoardWriter(tmp_path, dist.StepMeter(), every=1, per_rank=True)
    board.write(loss=3.0)
    del board  # as at the end of a program
    gc.collect()
    assert scalars(tmp_path / "rank0")["loss"] == [(1, 3.0)]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    def missing(name: str) -> object:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("dure.parallel.metrics.board.importlib.import_module", missing)
    with pytest.raises(UsageError) as caught:
        dist.TensorBoardWriter(tmp_path / "new", dist.StepMeter())
    assert "'.[tensorboard]'" in caught.value.fix
    assert not (tmp_path / "new").exists()
