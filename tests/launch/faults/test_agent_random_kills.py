"""The drill of random kills (`drills`), a few of them: jobs end as foretold, and keep all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drills.__main__ import run_job
from drills.plans import Kill, Plan, draw_plan


def kills(*victims: str) -> tuple[Kill, ...]:
    return tuple(Kill(victim, 0.05 * number, 0.5) for number, victim in enumerate(victims))


ROUNDS = Plan(
    kind="rounds",
    agents=2,
    nproc=2,
    max_restarts=9,
    kills=kills("worker during a restart", "rank 0 during a commit", "coordinator agent"),
)
ELASTIC = Plan(
    kind="elastic",
    agents=1,
    nproc=3,
    max_restarts=9,
    kills=kills("survivor while all regroup", "newcomer while it gets the state"),
)


def test_killed_jobs_end_as_foretold_and_keep_all(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:  # both at once: they wait most of the time
        jobs = [
            (plan, pool.submit(run_job, plan, tmp_path / plan.kind)) for plan in (ROUNDS, ELASTIC)
        ]
    for plan, deaths in jobs:
        assert len(deaths.result()) == len(plan.kills)


def test_seed_draws_the_same_job_again() -> None:
    plans = [draw_plan(seed) for seed in range(100)]
    assert plans == [draw_plan(seed) for seed in range(100)]
    assert {plan.kind for plan in plans} == {"rounds", "elastic"}
