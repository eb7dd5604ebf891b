"""Medians of steps, and reports that compare ranks."""

from __future__ import annotations

import pytest

from dure.parallel.metrics.split import StepReport, StepSplit, median_split


def test_medians_are_taken_of_each_field_and_leave_no_phase_negative():
    steps = [StepSplit(forward_s=f, total_s=t) for f, t in [(1, 9), (8, 4), (3, 1)]]
    middle = median_split(steps)
    assert (middle.forward_s, middle.total_s) == (3, 4)
    assert StepSplit(forward_s=5, total_s=4).other_s == 0
    assert StepSplit(exposed_comm_s=5, total_s=4).own_s == 0


def report_of(*ranks: tuple[float, float]) -> StepReport:
    """Ranks of (own, exposed) seconds."""
    return StepReport(
        ranks=tuple(
            StepSplit(exposed_comm_s=e, total_s=own + e, forward_s=own, samples=10, num_bytes=2e6)
            for own, e in ranks
        ),
        num_steps=4,
    )


def test_the_slowest_rank_is_the_one_that_waits_least():
    report = report_of((1.0, 1.0), (1.75, 0.25), (1.0, 1.0))
    assert report.slowest == 1
    assert report.imbalance == pytest.approx(1.75 / 1.25 - 1)
    assert report.samples_per_s == pytest.approx(15)
    assert "rank 1 is the slowest" in str(report)
    assert "2.0 MB reduced" in str(report)
    assert report.scalars()["step/exposed_comm_s"] == pytest.approx(0.75)
