"""What the ranks of the tests of verification do."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.errors import CommTimeout
from tests.comm.conformance import suite

ORDER_IS_GLOOS = ("case_order_of_reduction_is_that_of_ranks",)


def come_late(rank: int) -> None:
    group = dist.new_group(backend="gloo", pg_options={"verify": True})
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=0.5))
    if rank > 0:
        dist.barrier()  # rank 0 has given up
    with pytest.raises(CommTimeout) as info:
        dist.all_reduce(torch.ones(4), group=group)
    if rank == 0:
        assert info.value.missing == (1, 2)
        assert info.value.whereabouts.keys() == {1, 2}
        assert all(__file__ in text for text in info.value.whereabouts.values())
        dist.barrier()
    dist.destroy_process_group(group)


def keys(rank: int) -> tuple[int, int]:
    """Count the group's keys before and after a number of calls."""
    group = dist.new_group(backend="gloo", pg_options={"verify": True})
    dist.barrier(group)
    before = len(group.store.list_keys())
    works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for _ in range(20)]
    t = torch.ones(8)
    dist.all_reduce(t, group=group)
    assert t.tolist() == [3.0] * 8
    assert all(w is not None and w.wait() for w in works)
    dist.barrier()
    after = len(group.store.list_keys())
    dist.barrier()
    dist.destroy_process_group(group)
    return before, after


def run_verified(rank: int, n: int, folder: str, subject: str) -> list[str]:
    os.environ["DURE_VERIFY"] = "1"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    return suite.run(rank, subject, ORDER_IS_GLOOS)
