"""DDP's gradients over a simulated NCCL, whose operations are as late as they may be."""

from __future__ import annotations

import pytest

import dure as dist
from tests.parallel.ddp import nccl_ranks
from tests.testing.accelerator.simulated_ranks import cases_of, chosen

CASES = cases_of(nccl_ranks)


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Run the cases on two ranks; return each rank's errors by case."""
    return dist.spawn(nccl_ranks.run, 2, (chosen(request, CASES),))


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]
