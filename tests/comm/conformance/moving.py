"""Cases of the operations that move data without changing it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import dure as dist

from .values import counts, movable, noise, same


def _each(n: int) -> list[tuple[int, torch.dtype]]:
    """Return all counts for one dtype, and one count for all dtypes."""
    return [(c, torch.float32) for c in counts(n)] + [(2 * n + 1, d) for d in movable(n)]


def case_broadcast(rank, n):
    for i, (count, dtype) in enumerate(_each(n)):
        src = i % n
        t = noise(100 * src + i, count, dtype) if rank == src else noise(1, count, dtype)
        dist.broadcast(t, src=src)
        assert same(t, noise(100 * src + i, count, dtype)), (count, dtype)


def case_all_gather(rank, n):
    for count, dtype in _each(n):
        outputs = [torch.empty_like(noise(0, count, dtype)) for _ in range(n)]
        dist.all_gather(outputs, noise(rank, count, dtype))
        assert all(same(o, noise(r, count, dtype)) for r, o in enumerate(outputs)), (count, dtype)


def case_all_gather_uneven(rank, n):
    for dtype in movable(n):
        outputs = [torch.empty_like(noise(0, 3 * r, dtype)) for r in range(n)]
        dist.all_gather(outputs, noise(rank, 3 * rank, dtype))
        assert all(same(o, noise(r, 3 * r, dtype)) for r, o in enumerate(outputs)), dtype


def case_all_gather_single(rank, n):
    for count, dtype in _each(n):
        output = torch.empty_like(noise(0, n * count, dtype))
        dist.all_gather_single(output, noise(rank, count, dtype))
        parts = output.view(n, count)
        assert all(same(p, noise(r, count, dtype)) for r, p in enumerate(parts)), (count, dtype)


def case_gather(rank, n):
    for i, (count, dtype) in enumerate(_each(n)):
        dst = i % n
        slots = [torch.empty_like(noise(0, count, dtype)) for _ in range(n)]
        dist.gather(noise(rank, count, dtype), slots if rank == dst else None, dst=dst)
        if rank == dst:
            assert all(same(s, noise(r, count, dtype)) for r, s in enumerate(slots)), (count, dtype)


def case_scatter(rank, n):
    for i, (count, dtype) in enumerate(_each(n)):
        src = i % n
        slots = [noise(r, count, dtype) for r in range(n)] if rank == src else None
        t = torch.empty_like(noise(0, count, dtype))
        dist.scatter(t, slots, src=src)
        assert same(t, noise(rank, count, dtype)), (count, dtype)


def case_all_to_all_uneven(rank, n):
    for dtype in movable(n):
        inputs = [noise(10 * rank + r, rank + 2 * r, dtype) for r in range(n)]
        outputs = [torch.empty_like(noise(0, r + 2 * rank, dtype)) for r in range(n)]
        dist.all_to_all(outputs, inputs)
        for r, o in enumerate(outputs):
            assert same(o, noise(10 * r + rank, r + 2 * rank, dtype)), dtype


def case_all_to_all_large(rank, n):
    inputs = [noise(10 * rank + r, 70_001 + r) for r in range(n)]
    outputs = [torch.empty(70_001 + rank) for _ in range(n)]
    dist.all_to_all(outputs, inputs)
    assert all(same(o, noise(10 * r + rank, 70_001 + rank)) for r, o in enumerate(outputs))


def case_all_to_all_single(rank, n):
    for count, dtype in _each(n):
        k = min(count, 140_000 // n)
        given = torch.stack([noise(10 * rank + r, k, dtype) for r in range(n)]).view(-1)
        output = torch.empty_like(given)
        dist.all_to_all_single(output, given)
        for r, part in enumerate(output.view(n, k)):
            assert same(part, noise(10 * r + rank, k, dtype)), (k, dtype)


def case_all_to_all_single_uneven(rank, n):
    """Rank r sends r + 2 j rows of 3 to rank j."""
    gives, takes = [rank + 2 * r for r in range(n)], [r + 2 * rank for r in range(n)]
    given = torch.cat([torch.full((k, 3), 10 * rank + r) for r, k in enumerate(gives)])
    output = torch.empty(sum(takes), 3, dtype=given.dtype)
    dist.all_to_all_single(output, given, takes, gives)
    wanted = torch.cat([torch.full((k, 3), 10 * r + rank) for r, k in enumerate(takes)])
    assert torch.equal(output, wanted)


def case_all_to_all_single_with_splits_on_some_ranks(rank, n):
    """Split sizes may be left out where parts are equal, and may be arrays.

    By all ranks, where a foreign engine moves the data: with them it does other things.
    """
    foreign = dist.get_backend() in ("gloo", "mpi")
    wanted = torch.cat([torch.arange(2).view(1, 2) + 2 * rank + 10 * r for r in range(n)])
    rows = torch.arange(2 * n).view(n, 2) + 10 * rank
    for some in (None, [1] * n, np.ones(n, dtype=int), torch.ones(n, dtype=torch.int64)):
        splits: Any = some if foreign or rank == n - 1 else None
        output = torch.empty_like(rows)
        dist.all_to_all_single(output, rows, splits, splits)
        assert torch.equal(output, wanted)


def case_barrier(rank, n):
    for _ in range(5):
        dist.barrier()
    work = dist.barrier(async_op=True)
    assert work.wait()


def case_objects(rank, n):
    mine = {"rank": rank, "text": "x" * (1000 * rank), "tensor": torch.arange(rank)}
    everyone = [None] * n
    dist.all_gather_object(everyone, mine)
    assert [o["rank"] for o in everyone] == list(range(n))
    assert [len(o["text"]) for o in everyone] == [1000 * r for r in range(n)]
    src = n - 1
    objects = [("a", 1), None, {"k": [1, 2]}] if rank == src else [None] * 3
    dist.broadcast_object_list(objects, src=src)
    assert objects == [("a", 1), None, {"k": [1, 2]}]
    gathered = [None] * n if rank == src else None
    dist.gather_object(rank * "z", gathered, dst=src)
    assert gathered is None or gathered == [r * "z" for r in range(n)]
    given = [{"for": r} for r in range(n)] if rank == src else None
    got = [None]
    dist.scatter_object_list(got, given, src=src)
    assert got == [{"for": rank}]
