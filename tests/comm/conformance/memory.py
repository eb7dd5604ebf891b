"""Cases of memory that ranks share; where a backend has none, it says so by type."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.errors import UsageError

WITHOUT = ("gloo", "nccl", "mpi")


def _shares() -> bool:
    return dist.get_backend() not in WITHOUT or dist.get_world_size() == 1


def _host_of(rank: int) -> tuple[int, ...]:
    group = dist.group.WORLD
    assert group is not None
    return next(host for host in group.hosts if rank in host)


def case_shared_empty_is_one_a_rank(rank, n):
    x = dist.shared_empty(2, 3)
    assert not x.any()
    x.fill_(float(rank))
    dist.barrier()
    assert torch.equal(x, torch.full((2, 3), float(rank)))
    dist.barrier()


def case_host_shared_empty_is_one_a_host_or_refused(rank, n):
    if not _shares():
        with pytest.raises(UsageError):
            dist.host_shared_empty(n, 4)
        return
    x = dist.host_shared_empty(n, 4, dtype=torch.float64)
    assert x.shape == (n, 4) and x.dtype is torch.float64 and not x.any()
    dist.barrier()
    x[rank] = rank + 1.0
    dist.barrier()
    wanted = [r + 1.0 if r in _host_of(rank) else 0.0 for r in range(n)]
    assert x[:, 0].tolist() == wanted and x[:, 3].tolist() == wanted
    dist.barrier()


def case_host_shared_tensors_of_nothing(rank, n):
    assert dist.host_shared_empty(0, 4).shape == (0, 4)


def case_broadcast_into_host_shared_memory(rank, n):
    if not _shares():
        return
    for count in (3, 5000, 700_001):
        x = dist.host_shared_empty(count)
        for root in {0, n - 1}:
            dist.barrier()
            if rank == root:
                torch.arange(root, root + count, out=x)
            dist.broadcast(x, src=root)
            assert torch.equal(x, torch.arange(root, root + count).float())
        dist.barrier()


def case_host_shared_memory_outlives_its_name(rank, n):
    if not _shares():
        return
    part = dist.host_shared_empty(1000)[10:20]
    if rank == _host_of(rank)[0]:
        part.fill_(5.0)
    dist.barrier()
    assert part.eq(5.0).all()
    dist.barrier()
