"""What torch's callers pass to the plug-in: no limit is said in four ways."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from dure.errors import CommTimeout
from tests.torch_backend.torch_worlds import in_pool, shared, td, world


def limits_of_wait(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        notes = shared(group)
        if rank == 1:
            notes.wait(["waiting"])
            td.all_reduce(torch.ones(2))
        else:
            work = td.all_reduce(torch.ones(2), async_op=True)
            with pytest.raises(CommTimeout):
                work.wait(timedelta(milliseconds=20))
            waits = [
                threading.Thread(target=work.wait, args=limit)
                for limit in ((), (None,), (timedelta(0),), (timedelta(milliseconds=-1),))
            ]
            for thread in waits:
                thread.start()
            notes.set("waiting", "yes")
            for thread in waits:
                thread.join()
            assert work.is_success()
        options = td.AllreduceOptions()
        assert options.timeout < timedelta(0)
        assert group.allreduce([torch.ones(1)], options).wait()
        if rank == 0:
            with pytest.raises(CommTimeout):
                td.barrier(timeout=timedelta(milliseconds=20))
            notes.set("late", "yes")
            notes.wait(["met"])  # the barrier goes on; leaving now could end it first
        else:
            notes.wait(["late"])
            td.barrier()
            notes.set("met", "yes")


test_limits_of_wait = in_pool(limits_of_wait)
