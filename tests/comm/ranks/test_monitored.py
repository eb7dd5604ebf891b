"""The monitored barrier: who is named, and when."""

from __future__ import annotations

import pytest

import dure as dist
from dure.errors import (
    CommTimeout,
)
from dure.testing import run_ranks
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(("wait_all", "missing"), [(False, (1,)), (True, (1, 3))])
def test_monitored_barrier_names_the_absent_on_all_that_came(wait_all, missing):
    def body(rank):
        if rank == 0:
            dist.group.WORLD.store.wait(["monitored/1/2"])
        if rank in (0, 2):
            limit = 0.1 if rank == 0 else PATIENCE_S
            with pytest.raises(CommTimeout) as caught:
                dist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all)
            assert caught.value.missing == missing
        dist.barrier()

    run_ranks(4, body)


def test_monitored_barrier_looks_at_every_rank_when_time_is_up():
    def body(rank):
        if rank == 0:
            dist.group.WORLD.store.wait(["monitored/1/1", "monitored/1/2"])
        dist.monitored_barrier(timeout=0 if rank == 0 else PATIENCE_S)

    run_ranks(3, body)
