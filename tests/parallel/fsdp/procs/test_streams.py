"""FSDP's streams on a simulated accelerator whose work is as late as it may be."""

from __future__ import annotations

import pytest

import dure as dist
from tests.parallel.fsdp.procs import simulated_ranks

CASES = [name.removeprefix("case_") for name in vars(simulated_ranks) if name.startswith("case_")]
OF_4 = "of_4_"


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run the cases that were asked for, on two ranks or on four; return the ranks' errors."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    names = {c.params["case"] for c in chosen if c is not None and "case" in c.params} & {*CASES}
    found: dict[str, list[str]] = {name: [] for name in names}
    for size in (2, 4):
        of_size = [name for name in sorted(names) if name.startswith(OF_4) == (size == 4)]
        for of_rank in dist.spawn(simulated_ranks.run, size, (of_size,)) if of_size else ():
            for name, error in of_rank.items():
                found[name].append(error)
    return found


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: dict[str, list[str]], case: str):
    assert not any(errors[case]), next(filter(None, errors[case]))
