"""What the ranks of the tests of verification do."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import dure as dist
from conformance import suite
from dure.errors import CommTimeout, Desync

ORDER_IS_GLOOS = ("case_order_of_reduction_is_that_of_ranks",)


def _ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def _odd_call(kind: str, odd: bool, t: torch.Tensor, group: object) -> Callable[[], object]:
    """What one rank calls on `t`; the `odd` one something else."""
    n = t.numel()
    if kind == "operation":
        return (
            (lambda: dist.broadcast(t, 0, group))
            if odd
            else lambda: dist.all_reduce(t, group=group)
        )
    if kind == "reduction":
        op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        return lambda: dist.all_reduce(t, op, group)
    if kind == "root":
        return lambda: dist.broadcast(t, int(odd), group)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(_ones(2 * n), t, group)
    return lambda: dist.all_reduce(t, group=group)


def differ(rank: int, kind: str, lengths: tuple[int, int], dtypes: tuple[str, str]) -> None:
    odd = rank == 1
    group = dist.new_group(backend="gloo", pg_options={"verify": True})
    warm = _ones(4)
    dist.all_reduce(warm, group=group)
    t = torch.full((lengths[odd],), rank + 1, dtype=getattr(torch, dtypes[odd]))
    before = t.clone()
    call = _odd_call(kind, odd, t, group)
    with pytest.raises(Desync) as info:
        call()
    assert set(info.value.calls) == {0, 1} and info.value.seq == 2
    assert all(f"at {__file__}:" in text for text in info.value.calls.values())
    assert torch.equal(t, before), "data were touched"
    with pytest.raises(Desync):
        dist.barrier(group)
    dist.destroy_process_group(group)


def come_late(rank: int) -> None:
    group = dist.new_group(backend="gloo", pg_options={"verify": True})
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=0.5))
    if rank > 0:
        dist.barrier()  # rank 0 has given up
    with pytest.raises(CommTimeout) as info:
        dist.all_reduce(_ones(4), group=group)
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
    works = [dist.all_reduce(_ones(8), group=group, async_op=True) for _ in range(20)]
    t = _ones(8)
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
