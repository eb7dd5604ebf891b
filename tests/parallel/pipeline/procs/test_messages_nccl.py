"""Messages of pipelines over a simulated NCCL, whose operations are as late as they may be."""

from __future__ import annotations

import pytest

from tests.parallel.pipeline import nccl_ranks
from tests.testing.accelerator.simulated_ranks import cases_of, errors_on_two_ranks

CASES = cases_of(nccl_ranks)
errors = errors_on_two_ranks(nccl_ranks)


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]
