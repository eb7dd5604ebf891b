"""The drill of random kills (`tests/drills`), a few of them: jobs end as foretold, and keep all."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.__main__ import run_job
from drills.plans import Kill, Plan, draw_plan

pytestmark = pytest.mark.timeout(180)


def kills(*victims: str) -> tuple[Kill, ...]:
    return tuple(Kill(victim, 0.05 * number, 0.5) for number, victim in enumerate(victims))


ROUNDS = Plan(
    kind="rounds",
    agents=2,
    nproc=2,
    max_restarts=9,
    kills=kills("agent", "worker during a restart", "rank 0 during a commit", "coordinator agent"),
)
NO_RESTART_LEFT = Plan(
    kind="rounds",
    agents=1,
    nproc=2,
    max_restarts=1,
    kills=kills("worker", "rank 0"),
)
ELASTIC = Plan(
    kind="elastic",
    agents=1,
    nproc=3,
    max_restarts=9,
    kills=kills("survivor while all regroup", "newcomer while it gets the state", "rank 0"),
)


@pytest.mark.parametrize(
    "plan", [ROUNDS, NO_RESTART_LEFT, ELASTIC], ids=["rounds", "no restart left", "elastic"]
)
def test_killed_job_ends_as_foretold_and_keeps_all(plan: Plan, tmp_path: Path) -> None:
    deaths = run_job(plan, tmp_path / "job")
    assert len(deaths) == len(plan.kills)


def test_seed_draws_the_same_job_again() -> None:
    plans = [draw_plan(seed) for seed in range(100)]
    assert plans == [draw_plan(seed) for seed in range(100)]
    assert {plan.kind for plan in plans} == {"rounds", "elastic"}
