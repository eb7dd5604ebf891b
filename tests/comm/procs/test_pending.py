"""Results of functional collectives that are dropped without a look, on the engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import dure as dist
from dure.comm import functional
from dure.comm.pending import AsyncCollectiveTensor

pytestmark = pytest.mark.needs("engine")


def num_pending() -> int:
    gc.collect()
    return sum(type(each) is AsyncCollectiveTensor for each in gc.get_objects())


def drop(rank: int) -> tuple[int, int, bool]:
    """Return how many results are kept before and after the group ends, and whether it lives."""
    group = dist.new_group()
    for _ in range(10):
        for _ in range(20):
            functional.all_reduce(torch.ones(8), "sum", group)
        dist.barrier(group)
    kept, ref = num_pending(), weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return kept, num_pending(), ref() is not None


def test_dropped_results_are_freed_and_keep_no_group(process_pool) -> None:
    for kept, left, lives in process_pool(2).run(drop):
        assert kept < 100
        assert (left, lives) == (0, False)
