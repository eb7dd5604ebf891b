"""Cases of the operations that combine the ranks' data."""

from __future__ import annotations

import itertools

import pytest
import torch

import dure as dist
from dure.comm.ops import reducible_dtypes
from dure.errors import DtypeError

from .values import FEW, contribution, counts, noise, reduced, same, thorough

_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def _pairs(every: bool) -> list[tuple[str, torch.dtype]]:
    """Return every (operation, dtype) that has a meaning, or those of a few dtypes."""
    return [
        (op, dtype)
        for op in _OPS
        for dtype in sorted(reducible_dtypes(getattr(dist.ReduceOp, op)), key=str)
        if every or dtype in FEW
    ]


def case_all_reduce(rank, n):
    for op, dtype in _pairs(every=True):
        t = contribution(rank, 23, dtype, op)
        dist.all_reduce(t, getattr(dist.ReduceOp, op))
        assert same(t, reduced(n, 23, dtype, op)), (op, dtype, t)


def case_all_reduce_counts(rank, n):
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.uint8), counts(n)):
        t = (torch.arange(count) % 7 + rank).to(dtype)
        dist.all_reduce(t)
        wanted = ((torch.arange(count) % 7) * n + n * (n - 1) // 2).to(dtype)
        assert same(t, wanted), (dtype, count)


def case_reduce(rank, n):
    for i, (op, dtype) in enumerate(_pairs(thorough(n))):
        dst = i % n
        mine = contribution(rank, 2 * n + 1, dtype, op)
        t = mine.clone()
        dist.reduce(t, dst=dst, op=getattr(dist.ReduceOp, op))
        wanted = reduced(n, 2 * n + 1, dtype, op) if rank == dst else mine
        assert same(t, wanted), (op, dtype)


def case_reduce_counts(rank, n):
    for count in counts(n):
        t = torch.full((count,), float(rank + 1))
        dist.reduce(t, dst=0)
        total = n * (n + 1) / 2 if rank == 0 else rank + 1.0
        assert torch.equal(t, torch.full((count,), total)), count


def case_reduce_scatter_single(rank, n):
    for op, dtype in _pairs(thorough(n)):
        output = torch.empty_like(contribution(rank, 3, dtype, op))
        dist.reduce_scatter_single(
            output, contribution(rank, 3 * n, dtype, op), getattr(dist.ReduceOp, op)
        )
        assert same(output, reduced(n, 3 * n, dtype, op)[3 * rank : 3 * rank + 3]), (op, dtype)


def case_reduce_scatter_single_counts(rank, n):
    for count in counts(n):
        output = torch.empty(count)
        given = torch.arange(n * count, dtype=torch.float32) % 1000 + rank
        kept = given.clone()
        dist.reduce_scatter_single(output, given)
        wanted = (torch.arange(n * count) % 1000) * n + n * (n - 1) // 2
        assert torch.equal(output, wanted[rank * count : (rank + 1) * count].float()), count
        assert torch.equal(given, kept), "the input was changed"


def case_reduce_scatter_uneven(rank, n):
    """Part r has 2 r + 1 elements."""
    cuts = [2 * r + 1 for r in range(n)]
    end = sum(cuts[: rank + 1])
    for op, dtype in _pairs(thorough(n)):
        whole = contribution(rank, sum(cuts), dtype, op)
        ends = list(itertools.accumulate(cuts))
        parts = [whole[e - c : e].clone() for c, e in zip(cuts, ends, strict=True)]
        output = torch.empty_like(parts[rank])
        dist.reduce_scatter(output, parts, getattr(dist.ReduceOp, op))
        wanted = reduced(n, sum(cuts), dtype, op)[end - cuts[rank] : end]
        assert same(output, wanted), (op, dtype)


def case_nan_is_handed_on(rank, n):
    nan, low = float("nan"), float("-inf")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            t = torch.tensor([nan if rank == 0 else 1, nan if rank == n - 1 else low, -0.5])
            t = t.to(dtype)
            dist.all_reduce(t, op)
            assert t.isnan().tolist() == [True, True, False], (dtype, op, t)
            assert t[2] == -0.5


def case_results_are_bitwise_equal_on_all_ranks(rank, n):
    for dtype, count in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16), (n + 1, 33_331)
    ):
        floats = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        runs = [floats.to(dtype) for _ in range(2)]
        for t in runs:
            dist.all_reduce(t)
        gathered = [torch.empty_like(runs[0]) for _ in range(n)]
        dist.all_gather(gathered, runs[0])
        assert all(same(g, runs[0]) for g in gathered), "ranks differ"
        assert same(*runs), "runs differ"


def case_order_of_reduction_is_that_of_ranks(rank, n):
    """Sums grow from rank 0 on, in float32; 16 bit floats are rounded once, at the end.

    They are the same in all ways: synchronous or not, in shared memory, reduced or scattered.
    """
    for count, dtype in itertools.product((3, 8, 4097, 200_003), SUMMED):
        everyone = [
            torch.randn(count, generator=torch.Generator().manual_seed(r)) * 10 ** (r % 4)
            for r in range(n)
        ]
        rounded = [t.to(dtype) for t in everyone]
        wanted = rounded[0].float()
        for t in rounded[1:]:
            wanted = wanted + t.float()
        mine, late, shared, root, part = (rounded[rank].clone() for _ in range(5))
        shared = dist.shared_empty(count, dtype=dtype).copy_(shared)
        dist.all_reduce(mine)
        work = dist.all_reduce(late, async_op=True)
        dist.all_reduce(shared)
        dist.reduce(root, dst=n - 1)
        dist.reduce_scatter(part, [rounded[rank]] * n)
        work.wait()
        sums = [mine, late, shared, part, *([root] if rank == n - 1 else [])]
        assert all(same(t, wanted.to(dtype)) for t in sums), (dtype, count)


def case_premultiplied_sum(rank, n):
    t = torch.full((5,), 2.0)
    dist.all_reduce(t, dist.ReduceOp.premul_sum(rank + 1.0))
    assert torch.equal(t, torch.full((5,), float(n * (n + 1))))
    for count in (1, 3000, 100_000):  # inline, one-shot, in chunks
        x = torch.full((count,), 3.0, dtype=torch.float64)
        dist.reduce(x, dst=n - 1, op=dist.ReduceOp.premul_sum(0.5))
        assert rank != n - 1 or torch.equal(x, torch.full_like(x, 1.5 * n))
        x = torch.arange(count * n, dtype=torch.float32) % 64
        part = torch.empty(count)
        dist.reduce_scatter_single(part, x, dist.ReduceOp.premul_sum(0.25 * (rank + 1)))
        mine = x[rank * count : (rank + 1) * count]
        assert torch.equal(part, mine * (0.125 * n * (n + 1)))


def case_reduce_scatter_into_another_dtype(rank, n):
    # 256 and 1 are numbers of bfloat16, their sum is not: it has to be taken, and kept, in float32.
    for low in (torch.bfloat16, torch.float16):
        for count in (1, 7, 5000, 300_000):
            x = torch.full((n * count,), 256.0 if rank == 0 else 1.0, dtype=low)
            wide = torch.empty(count, dtype=torch.float32)
            dist.reduce_scatter_single(wide, x)
            assert torch.equal(wide, torch.full_like(wide, 256.0 + n - 1))
            dist.reduce_scatter_single(wide, x, dist.ReduceOp.AVG)
            assert torch.equal(wide, torch.full_like(wide, 256.0 + n - 1) / n)
            back = torch.empty(count, dtype=low)
            dist.reduce_scatter_single(back, x.float(), dist.ReduceOp.premul_sum(0.5))
            assert torch.equal(back, torch.full((count,), (256.0 + n - 1) / 2).to(low))
    with pytest.raises(DtypeError):
        dist.reduce_scatter_single(torch.empty(1), torch.empty(n, dtype=torch.float64))
    one = torch.ones(n, dtype=torch.bfloat16)
    with pytest.raises(DtypeError):
        dist.reduce_scatter_single(torch.empty(1), one, dist.ReduceOp.MAX)


def case_all_reduce_does_not_touch_neighbours(rank, n):
    base = noise(3, 64).nan_to_num().clamp(-9, 9)
    before = base.clone()
    view = base[7:20]
    view.fill_(1.0)
    dist.all_reduce(view)
    assert torch.equal(base[:7], before[:7])
    assert torch.equal(base[20:], before[20:])
    assert torch.equal(view, torch.full((13,), float(n)))
