"""Events, runs and their comparison: arithmetic on known numbers."""

import itertools
import random

import pytest

from dure.cli.demo.events import EpochEnd, Memory, Step, decode, encode
from dure.cli.demo.results import Run, common_target, comparison
from unit.demo.sample import START, finished_run, phases


@pytest.mark.parametrize(
    "event",
    [START, Step(step=3, loss=0.25, phases=phases(1.0, 0.5)), EpochEnd(epoch=1, accuracy=0.5)],
)
def test_event_comes_back_from_its_line(event):
    assert "\n" not in encode(event)
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    "line", ["", "epoch 1", '{"loss": 1}', '{"dure_demo":', '{"dure_demo":"other"}', "\ufffd"]
)
def test_ordinary_output_is_no_event(line):
    assert decode(line) is None


def test_run_averages_losses_and_waits_for_the_slowest_rank():
    run = Run(ranks=2, batch_size=4)
    run.add(0, Step(step=1, loss=1.0, phases=phases(1.0)))
    assert run.points == []
    run.add(1, Step(step=1, loss=3.0, phases=phases(2.0, 1.0)))
    (point,) = run.points
    assert point.loss == 2.0
    assert point.elapsed_s == 3.0
    assert point.phases["exposed communication"] == 0.5
    assert point.phases["other"] == 1.0  # the mean rank had nothing to do so long
    assert sum(point.phases.values()) == 3.0


def test_run_of_two_ranks_is_the_same_for_any_mix_of_their_events():
    first, second = (
        [START, *(Step(step=i, loss=i + r, phases=phases(i)) for i in range(1, 6))] for r in (0, 1)
    )
    expected = None
    for seed in range(5):
        rng, left = random.Random(seed), [list(first), list(second)]
        run = Run(ranks=2, batch_size=4)
        while any(left):
            rank = rng.choice([r for r in (0, 1) if left[r]])
            run.add(rank, left[rank].pop(0))
        expected = expected or run.points
        assert run.points == expected
        assert [p.step for p in run.points] == [1, 2, 3, 4, 5]


def test_run_counts_images_and_communication():
    run = finished_run(2, step_s=0.5, communication_s=0.125)
    assert run.train_s == 10.0
    assert run.images_per_s == 20 * 4 / 10.0
    assert run.communication_share == 0.25
    assert run.accuracy == 0.9
    assert run.accuracy_curve() == [(5.0, 0.5), (10.0, 0.9)]


def test_run_takes_accuracy_from_rank_0_alone():
    run = Run(ranks=2, batch_size=4)
    run.add(0, START)
    run.add(1, EpochEnd(epoch=1, accuracy=0.1))
    assert run.accuracy is None


def test_smooth_losses_are_means_of_the_last_steps():
    run = finished_run(1, step_s=1.0)
    losses = [p.loss for p in run.points]
    smooth = run.smooth_losses()
    assert smooth[0] == losses[0]
    assert smooth[19] == pytest.approx(sum(losses[9:20]) / 11)


def test_time_to_a_loss_is_that_of_the_first_step_there():
    run = finished_run(1, step_s=0.5)
    smooth = run.smooth_losses()
    assert run.time_to(smooth[7]) == 4.0
    assert run.time_to(smooth[7] * 0.999) == 4.5
    assert run.time_to(0.0) is None


def test_common_target_is_reached_by_every_run_and_has_two_digits():
    one, two = finished_run(1, 1.0), finished_run(2, 0.5)
    target = common_target([one, two])
    assert float(f"{target:.2g}") == pytest.approx(target)
    assert one.smooth_losses()[-1] < target < one.smooth_losses()[-2] * 2
    assert (one.time_to(target), two.time_to(target)) == (20.0, 10.0)


def test_comparison_says_what_the_last_run_gains():
    rows = comparison([finished_run(1, 1.0), finished_run(2, 0.5, 0.125)])
    by_label = {row.label.rstrip("0123456789."): row for row in rows}
    assert by_label["time to training loss "].gain == "2.00×"
    assert by_label["images/s"].values == ("4", "8")
    assert by_label["images/s"].gain == "2.00×"
    assert by_label["step time"].values == ("1000.0 ms", "500.0 ms")
    assert by_label["test accuracy"].gain == "+0.0 points"
    assert by_label["· exposed communication"].values == ("0.00 ms, 0%", "125.00 ms, 25%")
    assert by_label["· data wait"].values == ("0.00 ms, 0%",) * 2


def test_comparison_of_one_run_has_no_gain():
    rows = comparison([finished_run(1, 1.0)])
    assert set(itertools.chain.from_iterable(r.gain for r in rows)) == set()


def test_memory_is_the_most_of_every_rank_added_up():
    ddp, fsdp = finished_run(2, 1.0), finished_run(2, 1.0)
    ddp.way, fsdp.way = "DDP", "FSDP"
    assert [row.label for row in comparison([ddp, fsdp])].count("memory of all ranks") == 0
    for run, most in ((ddp, 30_000_000), (fsdp, 12_000_000)):
        run.add(0, Memory(nbytes=most))
        assert run.memory == 0  # one rank has not told
        run.add(1, Memory(nbytes=10_000_000))
        run.add(1, Memory(nbytes=8_000_000))
        assert run.memory == most + 10_000_000
    row = next(row for row in comparison([ddp, fsdp]) if row.label == "memory of all ranks")
    assert row.values == ("40 MB", "22 MB")
    assert row.gain == "1.82×"
    assert (ddp.name, fsdp.name) == ("DDP, 2 ranks", "FSDP, 2 ranks")
