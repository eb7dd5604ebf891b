"""The monitored barrier: who is named, and when."""

from __future__ import annotations

import pytest

import dure as dist
from dure.errors import CommTimeout
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(("wait_all", "missing"), [(False, (1,)), (True, (1, 3))])
@on_ranks(4)
def test_monitored_barrier_names_the_absent_on_all_that_came(rank, wait_all, missing):
    if rank == 0:
        dist.group.WORLD.store.wait(["monitored/1/2"])
    if rank in (0, 2):
        limit = 0.1 if rank == 0 else PATIENCE_S
        with pytest.raises(CommTimeout) as caught:
            dist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all)
        assert caught.value.missing == missing
    dist.barrier()


@on_ranks(3)
def test_monitored_barrier_looks_at_every_rank_when_time_is_up(rank):
    if rank == 0:
        dist.group.WORLD.store.wait(["monitored/1/1", "monitored/1/2"])
    dist.monitored_barrier(timeout=0 if rank == 0 else PATIENCE_S)


def keys_of_monitored_barriers() -> list[str]:
    """Return the keys in the store when no rank is inside a barrier."""
    dist.barrier()
    keys = [key for key in dist.group.WORLD.store.list_keys() if key.startswith("monitored/")]
    dist.barrier()
    return keys


@on_ranks(3)
def test_monitored_barriers_leave_one_answer_in_the_store(rank):
    for _ in range(3):
        dist.monitored_barrier()
    assert keys_of_monitored_barriers() == ["monitored/3/answer"]


@on_ranks(3)
def test_late_ranks_find_the_answer_of_a_barrier_that_failed(rank):
    if rank == 0:
        with pytest.raises(CommTimeout):
            dist.monitored_barrier(timeout=0)
    dist.barrier()
    if rank != 0:
        with pytest.raises(CommTimeout) as caught:
            dist.monitored_barrier()
        assert caught.value.missing == (1,)
    dist.monitored_barrier()
