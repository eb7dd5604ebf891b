"""The demo's table and its report, from runs that are made up."""

from __future__ import annotations

import pytest

from dure.cli.demo.results import Run, common_target, comparison, report


def finished_run(ranks: int, step_s: float, communication_s: float = 0.0) -> Run:
    """Return a run of 20 steps whose loss halves every step, from 8."""
    run = Run(ranks=ranks, batch_size=4)
    compute_s = step_s - communication_s
    phases = [0.0, compute_s / 4, compute_s / 2, communication_s, compute_s / 4, 0.0]
    for step in range(1, 21):
        run.add({"loss": 16 * 0.5**step, "phases": phases})
    run.add({"accuracy": 0.5})
    run.add({"accuracy": 0.9})
    return run


def test_time_to_a_loss_is_that_of_the_first_step_whose_smoothed_loss_is_there() -> None:
    run = finished_run(1, step_s=0.5)  # losses 8, 4, 2, ...: means 8, 6, 14/3, 3.75, ...
    assert (run.time_to(3.75), run.time_to(3.7), run.time_to(0.0)) == (2.0, 2.5, 10.0)


def test_common_target_is_just_above_the_worst_end_and_has_two_digits() -> None:
    # The last mean is 16 (2^-10 + ... + 2^-20) / 11 = 0.00284; 5 percent more are 0.00298.
    one, two = finished_run(1, 1.0), finished_run(2, 0.5)
    assert common_target([one, two]) == pytest.approx(0.0030)
    del one.losses[11:], one.phases[11:]  # 16 (2^-1 + ... + 2^-11) / 11 = 1.4538, and 1.527
    assert common_target([one, two]) == pytest.approx(1.6)


def test_comparison_shows_what_the_last_run_gains() -> None:
    heads, *rows = comparison([finished_run(1, 1.0), finished_run(2, 0.5, 0.125)])
    assert heads == ["", "1 rank", "2 ranks", "gain"]
    assert rows == [
        ["time to training loss 0.003", "20.00 s", "10.00 s", "2.00×"],
        ["images/s", "4", "8", "2.00×"],
        ["step time", "1000.0 ms", "500.0 ms", "2.00×"],
        ["· data wait", "0.00 ms, 0%", "0.00 ms, 0%", ""],
        ["· forward", "250.00 ms, 25%", "93.75 ms, 19%", ""],
        ["· backward", "500.00 ms, 50%", "187.50 ms, 38%", ""],
        ["· exposed communication", "0.00 ms, 0%", "125.00 ms, 25%", ""],
        ["· optimizer", "250.00 ms, 25%", "93.75 ms, 19%", ""],
        ["· other", "0.00 ms, 0%", "0.00 ms, 0%", ""],
        ["test accuracy", "90.0%", "90.0%", ""],
    ]


def test_report_is_self_contained_and_complete() -> None:
    one, two = finished_run(1, 1.0), finished_run(2, 0.5, 0.125)
    one.add({"facts": {"Images": "stripes & dots"}})
    text = report([one, two], "dure demo --out 'a <b>'")
    assert text.count("<polyline") == 2
    for outside in ("src=", "href", "url(", "<script", "<link", "<img", "<b>"):
        assert outside not in text
    for wanted in ("a &lt;b&gt;", "stripes &amp; dots", "Kernel", "2.00×", "gain", "2 ranks"):
        assert wanted in text
