"""Operations of the engine in torch's profiler."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from tests.profiles import names_in

pytestmark = pytest.mark.needs("engine")


def _profiled(rank: int) -> list[str]:
    del rank
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    with torch.profiler.profile() as profile:
        dist.all_reduce(tensor)
        started = dist.all_reduce(tensor, async_op=True)
        assert started is not None
        started.wait()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [16.0] * 4
    return names_in(profile)


def test_calls_of_the_engine_are_recorded_from_the_profiles_start_to_its_end(process_pool):
    expected = ["c10d::allreduce_", "shm:all_reduce", "c10d::allreduce_", "c10d::wait (all_reduce)"]
    assert process_pool(2, "shm").run(_profiled) == [expected, expected]
