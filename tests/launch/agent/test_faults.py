"""Whose fault a round's end is, and what people are told of it."""

from dataclasses import replace

import pytest

from dure.launch.agent.events import JobOutcome, RoundPlan
from dure.launch.agent.faults import Faults
from dure.launch.spec import RankResult
from tests.launch.agent.job_states import joined, result

PLAN = RoundPlan(4, (joined("a", 2), joined("b", 1)))
SECOND = result(2, "host-b")


def faults(first: RankResult | None, *others: RankResult, lost: str = "") -> Faults:
    found = Faults(lost=dict.fromkeys(lost, ""))
    if first is not None:
        found.report(first, failed=True)
    for other in others:
        found.report(other)
    return found


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        (faults(result(0)), 0),
        (faults(SECOND, result(0, code=9)), 2),
        (faults(result(0, peer=2), SECOND), 2),  # it was only the first to notice
        (faults(result(0, peer=2), result(2, "host-b", code=0)), 0),
        (faults(result(0, peer=2)), 0),
        (faults(None, lost="ba"), None),
    ],
)
def test_the_failure_that_explains_the_others(found: Faults, rank: int | None) -> None:
    cause = found.root_cause()
    assert (None if cause is None else cause.rank) == rank


def test_the_latest_report_of_the_first_to_fail_counts_unless_it_is_of_another_process() -> None:
    later = replace(result(1), last="all_reduce 5")
    assert faults(result(1), later).root_cause() == later
    assert faults(result(1), replace(later, pid=8)).root_cause() == result(1)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (faults(None, lost="ba"), "lost host-b, host-a"),
        (faults(result(0, peer=2), lost="b"), "lost host-b, with rank 2"),
        (faults(result(0, peer=1), lost="b"), "rank 0 on host-a raised PeerLost: gone"),
        (faults(result(0, peer=9), lost="b"), "rank 0 on host-a raised PeerLost: gone"),
        (faults(SECOND), "rank 2 on host-b failed: exit code 3"),
        (faults(result(1, peer=9)), "rank 1 on host-a raised PeerLost: gone"),
    ],
)
def test_why_a_round_ended(found: Faults, why: str) -> None:
    assert found.setback(PLAN) == why


def test_the_outcome_of_a_defeat() -> None:
    assert faults(SECOND, result(0)).defeat(PLAN, "limit") == JobOutcome(
        code=3, failure=SECOND, ranks=(result(0), SECOND), limit="limit"
    )
    assert faults(None, result(0), lost="b").defeat(PLAN, "") == JobOutcome(
        code=1,
        why="lost host-b; no restarts are allowed (--max-restarts), so the job ends",
        ranks=(result(0),),
    )
