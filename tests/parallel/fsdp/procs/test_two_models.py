"""Random programs of two models on real processes: no rank waits without end, numbers are right."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dure.testing import ProcessPool
from tests.parallel.fsdp.procs import two_models

SEEDS = range(200)
OFTEN = [28]
"""Run each time, as ranks once waited for each other in it; the others are for a drill."""


def run_all(pool: ProcessPool, seeds: Iterable[int]) -> None:
    for seed in seeds:
        done, *others = pool.run(two_models.run, seed)
        assert all(each == done for each in others)


@pytest.mark.needs("engine")
def test_some_programs_of_two_models(process_pool):
    run_all(process_pool(4, "shm"), OFTEN)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.needs("engine")
def test_many_programs_of_two_models(process_pool):
    run_all(process_pool(4, "shm"), SEEDS)
