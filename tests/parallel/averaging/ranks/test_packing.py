"""Tensors of an average: in how many reductions they go."""

from __future__ import annotations

import torch

import dure as dist
from dure.parallel.averaging import packing
from dure.testing import CommRecorder, run_ranks


def test_many_tensors_go_in_few_reductions_and_come_back_exact_3_ranks(monkeypatch):
    monkeypatch.setattr(packing, "PIECE_BYTES", 64)

    def rank_main(rank: int) -> list[tuple[str, int]]:
        shapes = [(2, 3), (5,), (), (4, 4), (0,)]
        tensors = [torch.full(shape, 3.0 * rank) for shape in shapes]
        tensors += [torch.full((3,), rank, dtype=torch.float64)]
        world = dist.group.WORLD
        assert world is not None
        with CommRecorder() as seen:
            packing.average_(tensors, world)
        assert all(bool((t == (1 if t.dtype == torch.float64 else 3)).all()) for t in tensors)
        return [(e.op, e.nbytes) for e in seen.events]

    # float32: 6 + 5 + 1 numbers fill a piece of 64 bytes, 16 another; and one of float64
    sizes = (12 * 4, 16 * 4, 3 * 8)
    assert run_ranks(3, rank_main) == [[("all_reduce", size) for size in sizes]] * 3
