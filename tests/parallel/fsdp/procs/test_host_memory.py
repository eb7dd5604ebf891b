"""Shards in the host's memory, on a simulated accelerator whose work is as late as it may be."""

from __future__ import annotations

import pytest
import torch

from dure.parallel.fsdp import host_memory
from dure.parallel.fsdp.host_memory import HostMemory
from tests.parallel.fsdp.procs import host_memory_ranks
from tests.parallel.fsdp.procs.simulated_ranks import errors_of
from tests.testing.accelerator.simulated_ranks import cases_of, chosen

CASES = cases_of(host_memory_ranks)
OVER_NCCL = (
    "a_step",
    "gradients_are_added",
    "hooks_get_gradients",
    "shards_are_written_after_a_forward",
)
Errors = dict[str, list[str]]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Run the cases that were asked for over staging."""
    folder = str(tmp_path_factory.mktemp("staging"))
    return errors_of(host_memory_ranks.run, chosen(request, CASES), "shm", folder)


@pytest.fixture(scope="module")
def errors_over_nccl(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Errors:
    """Run some over NCCL, whose operations have streams of their own."""
    folder = str(tmp_path_factory.mktemp("nccl"))
    return errors_of(host_memory_ranks.run, chosen(request, OVER_NCCL), "simulated_nccl", folder)


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(errors: Errors, case: str):
    assert not any(errors[case]), next(filter(None, errors[case]))


@pytest.mark.needs("engine")
@pytest.mark.parametrize("case", OVER_NCCL)
def test_training_over_nccl_is_that_of_one_rank(errors_over_nccl: Errors, case: str):
    assert not any(errors_over_nccl[case]), next(filter(None, errors_over_nccl[case]))


def test_shards_and_gradients_are_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch):
    allocated: list[tuple[list[int], torch.dtype]] = []

    def pinned_empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        allocated.append(([*shape], dtype))
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(host_memory, "pinned_empty", pinned_empty)
    pinned = HostMemory(torch.device("cuda"), pins=True)
    assert pinned.shard_in(torch.ones(2, 3)).tolist() == [[1, 1, 1], [1, 1, 1]]
    gradient = pinned.gradient_in(torch.ones(4).double(), torch.float32, waits=True)
    assert gradient.tolist() == [1, 1, 1, 1]
    assert allocated == [([2, 3], torch.float32), ([4], torch.float32)]
    shard = torch.ones(2)
    assert HostMemory(torch.device("cuda"), pins=False).shard_in(shard) is shard
    assert len(allocated) == 2
