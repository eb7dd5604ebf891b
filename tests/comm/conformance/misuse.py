"""Cases of what one rank alone can know: a typed error before anything is sent.

After each mistake, made on all ranks, the group still works.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dure as dist
from dure.errors import DeviceError, DtypeError, NotInGroupError, ShapeError, UsageError

X = torch.zeros(4)
INTS = torch.zeros(4, dtype=torch.int64)
COMPLEX = torch.zeros(4, dtype=torch.complex64)


def _peer() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


# Each is called with the number of ranks; arguments of wrong types are what is tried here.
# pyright: reportArgumentType=false
MISTAKES: list[tuple[type[Exception], Callable[[int], object]]] = [
    # lengths
    (ShapeError, lambda n: dist.all_gather([X] * (n + 1), X)),
    (ShapeError, lambda n: dist.all_gather([torch.zeros(3)] * n, X)),
    (ShapeError, lambda n: dist.all_gather_single(torch.zeros(4 * n + 1), X)),
    (ShapeError, lambda n: dist.reduce_scatter(X, [X] * (n + 1))),
    (ShapeError, lambda n: dist.reduce_scatter(X, [torch.zeros(5)] * n)),
    (ShapeError, lambda n: dist.reduce_scatter_single(X, torch.zeros(4 * n + 1))),
    (ShapeError, lambda n: dist.all_to_all([X] * n, [X] * (n + 1))),
    (ShapeError, lambda n: dist.all_to_all_single(torch.zeros(n), torch.zeros(n + 1))),
    (ShapeError, lambda n: dist.all_to_all_single(X, X, [4] * n, [3] * n)),
    (ShapeError, lambda n: dist.all_reduce(torch.zeros(1).expand(4))),
    (UsageError, lambda n: dist.all_gather(X, X)),
    (UsageError, lambda n: dist.all_to_all_single(X, X, ["1"] * n, [1] * n)),
    # dtypes, devices, layouts
    (DtypeError, lambda n: dist.all_reduce(X, dist.ReduceOp.BXOR)),
    (DtypeError, lambda n: dist.all_reduce(COMPLEX, dist.ReduceOp.MAX)),
    (DtypeError, lambda n: dist.all_reduce(INTS > 0, dist.ReduceOp.AVG)),
    (DtypeError, lambda n: dist.all_gather([INTS] * n, X)),
    (DeviceError, lambda n: dist.all_reduce(torch.zeros(3, device="meta"))),
    (DeviceError, lambda n: dist.broadcast(torch.eye(3).to_sparse(), src=0)),
    (DeviceError, lambda n: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)),
    (UsageError, lambda n: dist.all_reduce([1.0, 2.0])),
    (UsageError, lambda n: dist.all_reduce(X, op="median")),
    (UsageError, lambda n: dist.all_reduce(X, dist.ReduceOp.PREMUL_SUM)),
    # ranks and groups
    (NotInGroupError, lambda n: dist.broadcast(X, src=n)),
    (NotInGroupError, lambda n: dist.broadcast(X, "0")),
    (NotInGroupError, lambda n: dist.broadcast(X, [0])),
    (NotInGroupError, lambda n: dist.broadcast(X, group_src="0")),
    (UsageError, lambda n: dist.broadcast(X)),
    (UsageError, lambda n: dist.broadcast(X, 0, group_src=0)),
    (UsageError, lambda n: dist.barrier(group="world")),
    (UsageError, lambda n: dist.new_group(2)),
    (UsageError, lambda n: dist.new_group(["0", "1"])),
    (UsageError, lambda n: dist.monitored_barrier(timeout=-1)),
    # messages
    (UsageError, lambda n: dist.send(X, dst=dist.get_rank())),
    (UsageError, lambda n: dist.isend(X, _peer(), tag=2**40)),
    (UsageError, lambda n: dist.isend(X, _peer(), tag=-1)),
    (UsageError, lambda n: dist.batch_isend_irecv([])),
    (UsageError, lambda n: dist.P2POp(dist.send, X, 0)),
]


def case_mistakes(rank, n):
    for number, (kind, call) in enumerate(MISTAKES):
        with pytest.raises(kind) as caught:
            call(n)
        assert isinstance(caught.value, ValueError), number
        _still_works(n)


def case_roots_lists(rank, n):
    given = [X] * n
    if rank == 0:
        with pytest.raises(ShapeError):
            dist.scatter(X, [X] * (n + 1), src=0)
        given = None
    with pytest.raises(UsageError):
        dist.gather(X, given, dst=0)
    with pytest.raises(UsageError):
        dist.scatter(X, given, src=0)
    with pytest.raises(UsageError):
        dist.gather(X, torch.ones(n), dst=0)
    slots = [torch.ones(1) for _ in range(n)] if rank == 0 else ()
    dist.gather(torch.ones(1), slots, dst=0)


def case_nested_coalescing(rank, n):
    with dist.coalescing_manager(), pytest.raises(UsageError), dist.coalescing_manager():
        pass
    _still_works(n)


def _still_works(n: int) -> None:
    t = torch.ones(2)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((2,), float(n)))
