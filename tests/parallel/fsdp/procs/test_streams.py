"""FSDP's streams on a simulated accelerator whose work is as late as it may be."""

from __future__ import annotations

import pytest

from tests.parallel.fsdp.procs import simulated_ranks
from tests.parallel.fsdp.procs.simulated_ranks import errors_of, run
from tests.testing.accelerator.simulated_ranks import cases_of, chosen

CASES = cases_of(simulated_ranks)
OVER_NCCL = (
    "a_step",
    "a_scaler_skips_the_step_if_one_shard_overflows",
    "a_hook_of_the_program_reads_the_gradient",
    "unshard_sees_what_was_written",
    "low_precision",
    "of_4_parts_are_kept_until_backward",
)
"""At least one for each wait between streams."""


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run the cases that were asked for over staging."""
    return errors_of(run, chosen(request, CASES), "shm")


@pytest.fixture(scope="module")
def errors_over_nccl(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run some over NCCL, whose operations have streams of their own."""
    return errors_of(run, chosen(request, OVER_NCCL), "simulated_nccl")


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: dict[str, list[str]], case: str):
    assert not any(errors[case]), next(filter(None, errors[case]))


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", OVER_NCCL)
def test_training_over_nccl_is_that_of_one_rank(errors_over_nccl: dict[str, list[str]], case: str):
    assert not any(errors_over_nccl[case]), next(filter(None, errors_over_nccl[case]))
