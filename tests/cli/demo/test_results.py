"""Events, runs, their comparison and their report: arithmetic on known numbers."""

import random

import pytest

from dure.cli.demo.events import EpochEnd, Step
from dure.cli.demo.report import Ran, write_report
from dure.cli.demo.results import Run, common_target, comparison
from tests.cli.demo.demo_sample import finished_run, phases

RAN = Ran(command="dure demo --out 'a <b>'", when="2026-01-31 12:00", busy_cores=0.5)


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
    for seed in range(5):
        left = [[Step(step=i, loss=i + r, phases=phases(i)) for i in range(1, 6)] for r in (0, 1)]
        rng, run = random.Random(seed), Run(ranks=2, batch_size=4)
        while any(left):
            rank = rng.choice([r for r in (0, 1) if left[r]])
            run.add(rank, left[rank].pop(0))
        assert [(p.step, p.loss) for p in run.points] == [(i, i + 0.5) for i in range(1, 6)]
        assert run.train_s == 15.0


def test_run_counts_images_communication_and_accuracy():
    run = finished_run(2, step_s=0.5, communication_s=0.125)
    assert run.train_s == 10.0
    assert run.images_per_s == 8.0
    assert run.communication_share == 0.25
    assert run.accuracy_curve() == [(5.0, 0.5), (10.0, 0.9)]
    run.add(1, EpochEnd(epoch=3, accuracy=0.1))  # rank 0 speaks for all
    assert run.accuracy == 0.9


def test_time_to_a_loss_is_that_of_the_first_step_where_the_last_steps_mean_is_there():
    run = finished_run(1, step_s=0.5)  # losses 8, 4, 2, ...: means 8, 6, 14/3, 3.75, ...
    assert run.smooth_losses()[:4] == pytest.approx([8, 6, 14 / 3, 3.75])
    assert run.time_to(3.75) == 2.0
    assert run.time_to(3.7) == 2.5
    assert run.time_to(0.0) is None


def test_common_target_is_just_above_the_worst_end_and_has_two_digits():
    # The last mean is 16 (2^-10 + ... + 2^-20) / 11 = 0.00284; 5 percent more are 0.00298.
    one, two = finished_run(1, 1.0), finished_run(2, 0.5)
    assert common_target([one, two]) == pytest.approx(0.0030)
    del one.points[11:]  # 16 (2^-1 + ... + 2^-11) / 11 = 1.4538, and 1.527
    assert common_target([one, two]) == pytest.approx(1.6)


def test_comparison_says_what_the_last_run_gains():
    rows = comparison([finished_run(1, 1.0), finished_run(2, 0.5, 0.125)])
    assert {row.label: (row.values, row.gain) for row in rows} == {
        "time to training loss 0.003": (("20.00 s", "10.00 s"), "2.00×"),
        "images/s": (("4", "8"), "2.00×"),
        "step time": (("1000.0 ms", "500.0 ms"), "2.00×"),
        "· data wait": (("0.00 ms, 0%", "0.00 ms, 0%"), ""),
        "· forward": (("250.00 ms, 25%", "93.75 ms, 19%"), ""),
        "· backward": (("500.00 ms, 50%", "187.50 ms, 38%"), ""),
        "· exposed communication": (("0.00 ms, 0%", "125.00 ms, 25%"), ""),
        "· optimizer": (("250.00 ms, 25%", "93.75 ms, 19%"), ""),
        "· other": (("0.00 ms, 0%", "0.00 ms, 0%"), ""),
        "test accuracy": (("90.0%", "90.0%"), "+0.0 points"),
    }


def test_comparison_of_one_run_has_no_gain(tmp_path):
    alone = [finished_run(1, 1.0)]
    assert [row.gain for row in comparison(alone) if row.gain] == []
    write_report(tmp_path / "r.html", alone, RAN)
    assert "gain" not in (tmp_path / "r.html").read_text()
