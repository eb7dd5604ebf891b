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
    return dist.spawn(nccl_ranks.run, 2, (chosen(request, CASES),))


@pytest.mark.parametrize("case", CASES)
def test_case_on_two_ranks(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]


def test_results_of_three_ranks_are_those_of_other_backends():
    skip = (*NOT_SIMULATED, *NOT_OVER_NCCL)
    ran = dist.spawn(staged_ranks.conformance, 3, (BACKEND, SUBJECTS, skip))
    for subject in SUBJECTS:
        suite.check([cases[subject] for cases in ran], subject, skip)
