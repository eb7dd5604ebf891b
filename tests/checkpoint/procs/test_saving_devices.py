"""Checkpoints of device tensors, on a simulated accelerator whose work is as late as it may be."""

from __future__ import annotations

import pytest

from tests.checkpoint.procs import device_ranks
from tests.parallel.fsdp.procs.simulated_ranks import errors_of
from tests.testing.accelerator.simulated_ranks import cases_of, chosen

CASES = cases_of(device_ranks)


@pytest.fixture(scope="module", params=["shm", "simulated_nccl"])
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """Run the cases that were asked for, over staging and over NCCL."""
    folder = str(tmp_path_factory.mktemp(request.param))
    return errors_of(device_ranks.run, chosen(request, CASES), request.param, folder)


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_checkpoint_has_what_the_stream_had_at_the_call(errors: dict[str, list[str]], case: str):
    assert not any(errors[case]), next(filter(None, errors[case]))
