"""Cases of what one rank alone can know: a typed error before anything is sent."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.errors import DeviceError, DtypeError, NotInGroupError, ShapeError, UsageError


def _still_works(n: int) -> None:
    t = torch.ones(2)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((2,), float(n)))


def case_wrong_lengths(rank, n):
    x = torch.zeros(4)
    for call in (
        lambda: dist.all_gather([x] * (n + 1), x),
        lambda: dist.all_gather([torch.zeros(3)] * n, x),
        lambda: dist.all_gather_single(torch.zeros(4 * n + 1), x),
        lambda: dist.reduce_scatter(x, [x] * (n + 1)),
        lambda: dist.reduce_scatter(x, [torch.zeros(5)] * n),
        lambda: dist.reduce_scatter_single(x, torch.zeros(4 * n + 1)),
        lambda: dist.all_to_all([x] * n, [x] * (n + 1)),
        lambda: dist.all_to_all_single(torch.zeros(n), torch.zeros(n + 1)),
        lambda: dist.all_to_all_single(torch.zeros(n), torch.zeros(n), [1] * n, [2] * n),
    ):
        with pytest.raises(ShapeError):
            call()
    _still_works(n)


def case_roots_lists(rank, n):
    x = torch.zeros(4)
    if rank == 0:
        with pytest.raises(UsageError):
            dist.gather(x, None, dst=0)
        with pytest.raises(ShapeError):
            dist.scatter(x, [x] * (n + 1), src=0)
    else:
        with pytest.raises(UsageError):
            dist.gather(x, [x] * n, dst=0)
        with pytest.raises(UsageError):
            dist.scatter(x, [x] * n, src=0)
    _still_works(n)


def case_dtypes(rank, n):
    with pytest.raises(DtypeError):
        dist.all_reduce(torch.zeros(3), dist.ReduceOp.BXOR)
    with pytest.raises(DtypeError):
        dist.all_reduce(torch.zeros(3, dtype=torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises(DtypeError):
        dist.all_reduce(torch.zeros(3, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(DtypeError):
        dist.all_gather([torch.zeros(3, dtype=torch.int64)] * n, torch.zeros(3))
    _still_works(n)


def case_devices_and_layouts(rank, n):
    with pytest.raises(DeviceError):
        dist.all_reduce(torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError):
        dist.broadcast(torch.eye(3).to_sparse(), src=0)
    with pytest.raises(UsageError):
        dist.all_reduce([1.0, 2.0])
    _still_works(n)


def case_peers(rank, n):
    x = torch.zeros(2)
    with pytest.raises(NotInGroupError):
        dist.broadcast(x, src=n)
    with pytest.raises(UsageError):
        dist.send(x, dst=rank)
    with pytest.raises(UsageError):
        dist.broadcast(x)
    _still_works(n)


def case_output_that_shares_memory_with_itself(rank, n):
    with pytest.raises(ShapeError):
        dist.all_reduce(torch.zeros(1).expand(4))
    _still_works(n)
