"""Streams and messages of groups over NCCL, with a simulated NCCL."""

from __future__ import annotations

import pytest

from tests.comm.backends.engine import nccl_ranks
from tests.testing.accelerator.simulated_ranks import cases_of, errors_on_two_ranks

CASES = cases_of(nccl_ranks)
errors = errors_on_two_ranks(nccl_ranks)


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_case_on_two_ranks(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]
