"""The simulated NCCL, on ranks that are processes."""

from __future__ import annotations

import pytest

import dure as dist
from tests.comm import staged_ranks
from tests.comm.conformance import suite
from tests.comm.procs.test_staged import NOT_SIMULATED
from tests.testing.accelerator import nccl_ranks
from tests.testing.accelerator.simulated_ranks import BACKEND, cases_of, chosen

CASES = cases_of(nccl_ranks)
OF_3 = [case for case in CASES if case.startswith("of_3_")]
OF_2 = [case for case in CASES if case not in OF_3]
SUBJECTS = ("moving", "reducing", "layouts", "overlapping")
"""Not "messages", which sends first on all ranks: over NCCL a deadlock."""
NOT_OVER_NCCL = (
    "case_order_of_reduction_is_that_of_ranks",  # it rounds at each step
    "case_inference_tensors_outside_inference_mode",  # sends first on all ranks
)

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Run the cases on two ranks; return each rank's errors by case."""
    return dist.spawn(nccl_ranks.run, 2, (chosen(request, OF_2),))


@pytest.fixture(scope="module")
def errors_of_3(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Run the cases on three ranks."""
    return dist.spawn(nccl_ranks.run, 3, (chosen(request, OF_3),))


@pytest.mark.parametrize("case", OF_2)
def test_case_on_two_ranks(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]


@pytest.mark.parametrize("case", OF_3)
def test_case_on_three_ranks(errors_of_3: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors_of_3] == ["", "", ""]


def test_results_of_three_ranks_are_those_of_other_backends():
    skip = (*NOT_SIMULATED, *NOT_OVER_NCCL)
    ran = dist.spawn(staged_ranks.conformance, 3, (BACKEND, SUBJECTS, skip))
    for subject in SUBJECTS:
        suite.check([cases[subject] for cases in ran], subject, skip)
