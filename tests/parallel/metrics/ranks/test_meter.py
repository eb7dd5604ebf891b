"""The step meter and its timeline, with ranks that average gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
import dure as dist
from dure import trace
from dure.parallel.metrics import StepReport
from dure.parallel.metrics import meter as meter_module
from dure.testing import CommRecorder, run_ranks
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
    events: list[dict[str, Any]] = timeline(flight)["traceEvents"]
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


# --------------------------------------------------------------------------------------------------
# The step meter on one rank, by a clock that the test turns on; and the values it gives.


DATA, FORWARD, LOSS, BACKWARD, UPDATE, REST = 7, 20, 3, 50, 11, 2
MS = 1_000_000


class Clock:
    """Stands in for the module `time`; work takes as long as it says."""

    def __init__(self) -> None:
        self.now = 10**9

    def monotonic_ns(self) -> int:
        return self.now

    def work(self, ms: int) -> None:
        self.now += ms * MS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


class Slow(nn.Linear):
    """A layer whose forward and backward take a known time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(3, 1)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.work(FORWARD)
        out = super().forward(x)
        if out.grad_fn is not None:  # reached after the output's gradient, before the weight's
            out.grad_fn.register_hook(lambda *_: self.clock.work(BACKWARD))
        return out


class SlowSGD(torch.optim.SGD):
    def __init__(self, module: nn.Module, clock: Clock) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.clock = clock

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.clock.work(UPDATE)


def loader(clock: Clock, count: int) -> Iterator[dict[str, torch.Tensor]]:
    for _ in range(count):
        clock.work(DATA)
        yield {"x": torch.ones(5, 3)}
    clock.work(100)


def train(meter: dure.StepMeter, module: Slow, optimizer: SlowSGD | None, count: int, every=1):
    clock = module.clock
    for number, batch in enumerate(meter.batches(loader(clock, count)), 1):
        with torch.no_grad():
            module(batch["x"])  # no part of forward
        loss = module(batch["x"]).sum()
        clock.work(LOSS)
        loss.backward()
        if optimizer is not None and number % every == 0:
            optimizer.step()
        clock.work(REST)
    clock.work(1000)  # an evaluation


def test_each_step_is_split_into_its_phases(clock):
    module = Slow(clock)
    optimizer = SlowSGD(module, clock)
    meter = dure.StepMeter(module, optimizer)
    for _ in range(2):
        train(meter, module, optimizer, 3)
    assert meter.num_steps == 6
    for step in meter.steps():
        assert step.phases() == pytest.approx(
            {
                "data wait": DATA / 1e3,
                "forward": (FORWARD + LOSS) / 1e3,
                "backward": BACKWARD / 1e3,
                "exposed communication": 0,
                "optimizer": UPDATE / 1e3,
                "other": (REST + FORWARD) / 1e3,
            }
        )
        assert sum(step.phases().values()) == pytest.approx(step.total_s)
        assert step.samples == 5
    assert meter.last.samples_per_s == pytest.approx(5 / meter.last.total_s)


@pytest.mark.parametrize(("batches", "steps"), [(4, 2), (5, 2), (1, 0)])
def test_accumulation_makes_one_step_of_several_batches(clock, batches, steps):
    module = Slow(clock)
    optimizer = SlowSGD(module, clock)
    meter = dure.StepMeter(module, optimizer)
    train(meter, module, optimizer, batches, every=2)
    found = meter.steps()
    assert len(found) == steps
    for step in found:
        assert step.backward_s == pytest.approx(2 * BACKWARD / 1e3)
        assert step.data_wait_s == pytest.approx(2 * DATA / 1e3)
        assert step.samples == 10


def test_steps_can_be_ended_or_framed_by_hand(clock):
    meter = dure.StepMeter(None, SlowSGD(Slow(clock), clock))
    for _ in meter.batches(loader(clock, 2)):
        clock.work(4)
        meter.end_step()
        clock.work(30)
    with meter.step(samples=9):
        clock.work(6)
    assert [s.total_s for s in meter.steps()] == pytest.approx([0.011, 0.011, 0.006])
    assert meter.last.samples == 9


def test_kept_steps_are_the_last_and_a_closed_meter_watches_nothing(clock):
    module = Slow(clock)
    optimizer = SlowSGD(module, clock)
    meter = dure.StepMeter(module, optimizer, keep=2)
    train(meter, module, optimizer, 5)
    assert (meter.num_steps, len(meter.steps())) == (5, 2)
    meter.close()
    module(torch.ones(1, 3)).sum().backward()
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert meter.num_steps == 5
