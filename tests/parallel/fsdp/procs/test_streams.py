"""FSDP's streams on a simulated accelerator whose work is as late as it may be."""

from __future__ import annotations

import pytest

import dure as dist
from tests.parallel.fsdp.procs import simulated_ranks
from tests.testing.accelerator.simulated_ranks import chosen

CASES = [name.removeprefix("case_") for name in vars(simulated_ranks) if name.startswith("case_")]
OF_4 = "of_4_"


OVER_NCCL = ("a_step",)


def _run(names: list[str], backend: str) -> dict[str, list[str]]:
    """Run cases on two ranks or on four; return the ranks' errors by case."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for size in (2, 4):
        of_size = [name for name in names if name.startswith(OF_4) == (size == 4)]
        for of_rank in dist.spawn(simulated_ranks.run, size, (of_size, backend)) if of_size else ():
            for name, error in of_rank.items():
                found[name].append(error)
    return found


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run the cases that were asked for over staging."""
    return _run(chosen(request, CASES), "shm")


@pytest.fixture(scope="module")
def errors_over_nccl(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run some over NCCL, whose operations have streams of their own."""
    return _run(chosen(request, OVER_NCCL), "simulated_nccl")


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: dict[str, list[str]], case: str):
    assert not any(errors[case]), next(filter(None, errors[case]))


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", OVER_NCCL)
def test_training_over_nccl_is_that_of_one_rank(errors_over_nccl: dict[str, list[str]], case: str):
    assert not any(errors_over_nccl[case]), next(filter(None, errors_over_nccl[case]))
