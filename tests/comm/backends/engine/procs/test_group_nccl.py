"""Streams and messages of groups over NCCL, with a simulated NCCL."""

from __future__ import annotations

import pytest

import dure as dist
from tests.comm.backends.engine import nccl_ranks
from tests.testing.accelerator.simulated_ranks import cases_of, errors_on_two_ranks

CASES = [case for case in cases_of(nccl_ranks) if not case.startswith("death_")]
DEATHS = [case for case in cases_of(nccl_ranks) if case.startswith("death_")]
errors = errors_on_two_ranks(nccl_ranks)


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_case_on_two_ranks(errors: list[dict[str, str]], case: str):
    assert [of_rank[case] for of_rank in errors] == ["", ""]


@pytest.mark.needs("engine")
@pytest.mark.parametrize("death", DEATHS)
def test_rank_1_dies(death: str):
    """Rank 0 gets an error in time, though no host waits for NCCL."""
    of_survivor, of_dead = dist.spawn(nccl_ranks.run_with_limit, 2, ([death],), start="spawn")
    assert (of_survivor, of_dead) == ({death: ""}, None)
