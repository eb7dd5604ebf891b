"""Communicators that are split off their parent's, with a simulated NCCL."""

from __future__ import annotations

import pytest

import dure as dist
from tests.comm import splitting_ranks
from tests.testing.accelerator.simulated_ranks import cases_of, chosen

CASES = cases_of(splitting_ranks)
OF_4 = [case for case in CASES if case.startswith("of_4_")]
OF_3 = [case for case in CASES if case not in OF_4]

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module")
def errors_of_3(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Run the cases on three ranks; return each rank's errors by case."""
    return dist.spawn(splitting_ranks.run, 3, (chosen(request, OF_3),), start="spawn")


@pytest.fixture(scope="module")
def errors_of_4(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Run the cases on four ranks."""
    return dist.spawn(splitting_ranks.run, 4, (chosen(request, OF_4),), start="spawn")


@pytest.mark.parametrize("case", OF_3)
def test_case_on_three_ranks(errors_of_3: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors_of_3] == [""] * 3


@pytest.mark.parametrize("case", OF_4)
def test_case_on_four_ranks(errors_of_4: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors_of_4] == [""] * 4
