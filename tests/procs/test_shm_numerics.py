"""Sums of the shm backend do not depend on how they were made."""

from __future__ import annotations

import pytest
import torch

from dure.comm.ops import ReduceOp
from dure.native import available
from procs.forked_ranks import Ranks, Slot, join

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1] or "-")

COUNTS = [1, 7, 8, 9, 4095, 4097, 131071, 131073, 300_007]


def _noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * count + rank)
    return (torch.randn(count, generator=random) * 10 ** (rank % 4)).to(dtype)


def _sums(slot: Slot, dtype: torch.dtype):
    """Return for each count: the sum made in four ways, which must be one."""
    backend = join(slot)
    shared = backend.allocate(max(COUNTS) * dtype.itemsize, False).view(dtype)
    out = []
    for count in COUNTS:
        plain = _noise(slot.rank, count, dtype)
        late, heap, root = plain.clone(), shared[:count], plain.clone()
        heap.copy_(plain)
        backend.all_reduce(plain, ReduceOp.SUM, False)
        request = backend.all_reduce(late, ReduceOp.SUM, True)
        backend.all_reduce(heap, ReduceOp.SUM, False)
        backend.reduce(root, 0, ReduceOp.SUM, False)
        assert request is not None
        request.wait()
        assert torch.equal(plain, late)
        assert torch.equal(plain, heap)
        if slot.rank == 0:
            assert torch.equal(plain, root)
        out.append(plain.view(torch.uint8).numpy().tobytes())
    backend.close(False)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_sums_are_bitwise_the_same_in_every_way_and_on_every_rank(tmp_path, n, dtype):
    with Ranks(n, tmp_path, _sums, dtype) as ranks:
        first, *others = ranks.values()
        assert all(other == first for other in others)
    for count, got in zip(COUNTS, first, strict=True):
        wide = torch.float32
        total = _noise(0, count, dtype).to(wide)
        for rank in range(1, n):
            total += _noise(rank, count, dtype).to(wide)
        assert got == total.to(dtype).view(torch.uint8).numpy().tobytes()
