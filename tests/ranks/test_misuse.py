"""Inputs that one rank alone can know to be wrong: a typed error, and nothing is sent.

After each mistake, made on all ranks, a barrier shows that the group still works.
"""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.errors import DeviceError, DtypeError, NotInGroupError, ShapeError, UsageError
from dure.testing import run_ranks

ONE = torch.ones(4)

MISTAKES = {
    "not a tensor": (UsageError, lambda: dist.all_reduce([1.0])),
    "wrong device": (DeviceError, lambda: dist.all_reduce(torch.ones(2, device="meta"))),
    "sparse layout": (
        DeviceError,
        lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
    ),
    "sparse max": (
        DeviceError,
        lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
    ),
    "sum of nothing": (UsageError, lambda: dist.all_reduce(ONE.clone(), op="median")),
    "max of complex": (
        DtypeError,
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
    ),
    "bits of floats": (DtypeError, lambda: dist.all_reduce(ONE.clone(), dist.ReduceOp.BAND)),
    "mean of integers": (
        DtypeError,
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
    ),
    "premultiplied by nothing": (
        UsageError,
        lambda: dist.all_reduce(ONE.clone(), dist.ReduceOp.PREMUL_SUM),
    ),
    "gather list too short": (ShapeError, lambda: dist.all_gather([ONE.clone()], ONE)),
    "gather list not a list": (UsageError, lambda: dist.all_gather(ONE.clone(), ONE)),
    "gather list of other dtype": (
        DtypeError,
        lambda: dist.all_gather([torch.ones(4, dtype=torch.int64)] * 2, ONE),
    ),
    "own slot too small": (ShapeError, lambda: dist.all_gather([torch.ones(3)] * 2, ONE)),
    "output too small": (ShapeError, lambda: dist.all_gather_single(torch.ones(4), ONE)),
    "input not n times": (ShapeError, lambda: dist.reduce_scatter_single(torch.ones(3), ONE)),
    "parts unequal": (ShapeError, lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))),
    "splits do not add up": (
        ShapeError,
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 2]),
    ),
    "root out of range": (NotInGroupError, lambda: dist.broadcast(ONE.clone(), 7)),
    "root of text": (NotInGroupError, lambda: dist.broadcast(ONE.clone(), "0")),
    "root that is a list": (NotInGroupError, lambda: dist.broadcast(ONE.clone(), [0])),
    "group root of text": (NotInGroupError, lambda: dist.broadcast(ONE.clone(), group_src="0")),
    "splits of text": (
        UsageError,
        lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), ["1", "1"], [1, 1]),
    ),
    "ranks not a list": (UsageError, lambda: dist.new_group(2)),
    "ranks of text": (UsageError, lambda: dist.new_group(["0", "1"])),
    "tag too large": (UsageError, lambda: dist.isend(ONE, 1 - dist.get_rank(), tag=2**40)),
    "no root": (UsageError, lambda: dist.broadcast(ONE.clone())),
    "two roots": (UsageError, lambda: dist.broadcast(ONE.clone(), 0, group_src=0)),
    "send to oneself": (UsageError, lambda: dist.send(ONE, dist.get_rank())),
    "negative tag": (UsageError, lambda: dist.isend(ONE, 1 - dist.get_rank(), tag=-1)),
    "not a group": (UsageError, lambda: dist.barrier(group="world")),
    "empty batch": (UsageError, lambda: dist.batch_isend_irecv([])),
    "batch of something else": (UsageError, lambda: dist.P2POp(dist.send, ONE, 0)),
    "output that shares memory": (
        ShapeError,
        lambda: dist.all_reduce(torch.ones(1).expand(4)),
    ),
    "negative timeout": (UsageError, lambda: dist.monitored_barrier(timeout=-1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_raises_and_the_group_goes_on(mistake):
    kind, call = MISTAKES[mistake]

    def body(rank):
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == 2

    run_ranks(2, body)


def test_lists_are_given_at_the_root_only():
    def body(rank):
        lists = [torch.ones(1), torch.ones(1)]
        with pytest.raises(UsageError):
            dist.gather(torch.ones(1), None if rank == 0 else lists, dst=0)
        with pytest.raises(UsageError):
            dist.scatter(torch.ones(1), None if rank == 0 else lists, src=0)
        with pytest.raises(UsageError):
            dist.gather(torch.ones(1), torch.ones(2), dst=0)
        dist.gather(torch.ones(1), lists if rank == 0 else (), dst=0)

    run_ranks(2, body)


def test_nested_coalescing_raises():
    def body(rank):
        with (
            dist.coalescing_manager(),
            pytest.raises(UsageError),
            dist.coalescing_manager(),
        ):
            pass
        dist.barrier()

    run_ranks(2, body)
