"""What the engine's recorder notes of calls in shared memory."""

from __future__ import annotations

import inspect

import pytest
import torch

import dure as dist
from dure import trace
from dure.comm.world import current_world
from dure.trace.flight import recorded

pytestmark = pytest.mark.needs("engine")


def _noted(rank: int) -> None:
    group = current_world().default
    assert group is not None
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX)
    work = dist.broadcast(torch.ones(3, dtype=torch.int64), 1, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(torch.ones(5), 1, tag=9)
    else:
        dist.recv(torch.ones(5), 0, tag=9)
    # A broadcast's end may be noted a moment after its Work has settled.
    dist.barrier()
    reduce, cast, message, meet = recorded(rank)[-4:]
    assert (reduce.op, reduce.reduction, reduce.dtype, reduce.nbytes) == (
        "all_reduce",
        "MAX",
        "float32",
        40,
    )
    assert reduce.site == f"{__file__}:{line}"
    assert reduce.function == "_noted"
    assert not reduce.async_op
    assert 0 < reduce.start_ns <= reduce.end_ns <= meet.end_ns
    assert (cast.op, cast.dtype, cast.peer, cast.async_op) == ("broadcast", "int64", 1, True)
    assert cast.state is trace.State.SUCCEEDED
    assert cast.seq == reduce.seq + 1
    assert (message.op, message.peer, message.tag) == (("send", "recv")[rank], 1 - rank, 9)
    assert (meet.op, meet.seq) == ("barrier", cast.seq + 1)


def test_calls_are_noted_with_what_they_worked_on_2_ranks(process_pool):
    process_pool(2, "shm").run(_noted)
