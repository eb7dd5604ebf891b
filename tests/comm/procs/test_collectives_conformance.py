"""The conformance suite over processes: shared memory, Gloo, and hosts that are only pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from dure.testing import ProcessPool
from tests.comm.conformance import suite

ORDER = ("case_order_of_reduction_is_that_of_ranks",)  # Gloo has its own; hosts come one by one
CANNOT = {
    "gloo": (
        # Gloo has no signatures.
        *("case_mismatches", *ORDER),
    ),
    "hybrid": ORDER,
}


WORLDS = {  # the sizes, or the hosts of the ranks: those that run always, and slow ones
    "shm": ((1, 2, 3, 5), (4, 8)),
    "gloo": ((2, 3), (1, 4, 5, 8)),
    "hybrid": (("aabb", "abb"), ("abbb", "abab", "abcc", "abc")),
}


def _parameters() -> Iterator[ParameterSet]:
    for backend, (always, slow) in WORLDS.items():
        marks = [] if backend == "gloo" else [pytest.mark.needs("engine")]
        for world in (*always, *slow):
            marked = marks if world in always else [*marks, pytest.mark.slow]
            yield pytest.param((backend, world), id=f"{backend}-{world}", marks=marked)


@pytest.fixture(scope="module", params=_parameters())
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    backend, world = request.param
    hosts = world if backend == "hybrid" else None
    with ProcessPool(len(world) if hosts else world, backend, hosts=hosts) as made:
        yield made


@pytest.mark.parametrize("subject", suite.SUBJECTS)
def test_backend_keeps_the_contract(pool: ProcessPool, subject: str):
    skip = CANNOT.get(pool.backend or "", ())
    suite.check(pool.run(suite.run, subject, skip), subject, skip)
