"""Tensors of an accelerator over backends for CPU tensors, on an accelerator without hardware."""

from __future__ import annotations

import pytest

import dure as dist
from tests.comm import staged_ranks
from tests.comm.conformance import suite
from tests.comm.procs.test_collectives_conformance import CANNOT

CASES = [name.removeprefix("case_") for name in vars(staged_ranks) if name.startswith("case_")]
SUBJECTS = ("moving", "reducing", "messages", "layouts", "overlapping")
NOT_SIMULATED = ("case_sparse_tensors_of_other_layouts_are_refused",)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """Run the cases of streams on two ranks; return each rank's errors by case."""
    return dist.spawn(staged_ranks.streams, 2, (CASES,))


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_streams_are_ordered(failures: list[dict[str, str]], case: str):
    assert [errors[case] for errors in failures] == ["", ""]


ENGINE = pytest.mark.needs("engine")


@pytest.mark.parametrize(
    "backend",
    [pytest.param("shm", marks=ENGINE), pytest.param("hybrid", marks=ENGINE), "gloo", "threads"],
)
def test_backend_keeps_the_contract(backend: str):
    skip = (*NOT_SIMULATED, *CANNOT.get(backend, ()))
    if backend == "threads":
        (ran,) = dist.spawn(staged_ranks.conformance_of_threads, 1, (SUBJECTS, skip))
    else:
        by_device = f"cpu:{backend},sim:{backend}"
        ran = dist.spawn(staged_ranks.conformance, 2, (by_device, SUBJECTS, skip))
    for subject in SUBJECTS:
        suite.check([cases[subject] for cases in ran], subject, skip)


@pytest.mark.needs("engine")
def test_stock_pytorch_takes_such_tensors():
    all_ranks = [[3.0] * 3, [[3.0] * 3, [4.0] * 3], [0, 1]]
    assert dist.spawn(staged_ranks.stock, 2) == [[*all_ranks, [6.0] * 2], [*all_ranks, [5.0] * 2]]
