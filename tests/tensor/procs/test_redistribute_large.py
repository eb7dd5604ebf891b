"""Redistribution and `distribute_tensor` of parts so large that they are in shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dure.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.tensor.ranks.parts import part_of

N = 4
WAYS = [Shard(0), Shard(1), Shard(2), Replicate()]


def full_tensor() -> torch.Tensor:
    return torch.arange(16 * 320 * 256).remainder(1021).float().reshape(16, 320, 256)


def moves_large(rank: int) -> None:
    """Parts of more than 1 MiB, whose results are in memory that the ranks share."""
    mesh, full = init_device_mesh("cpu", (N,)), full_tensor()

    def expected(placement: Placement) -> torch.Tensor:
        return part_of(full, [placement], (N,), (rank,))

    kept: list[tuple[Any, Any]] = []
    for old, new in itertools.product([*WAYS, Partial()], WAYS):
        mine = expected(old)
        x = DTensor.from_local(mine, mesh, [old])
        y = x.redistribute(placements=[new])
        assert torch.equal(y.to_local(), expected(new)), (old, new)
        assert torch.equal(mine, expected(old))
        again = y.redistribute(placements=[Shard(1)])  # out of shared memory
        turned = DTensor.from_local(mine.transpose(1, 2), mesh, [_turned(old)])
        back = turned.redistribute(placements=[_turned(new)]).to_local()
        assert torch.equal(back, expected(new).transpose(1, 2))
        # A view keeps the memory, whatever else is freed and used again.
        kept.append((y.to_local()[1:], expected(new)[1:]))
        kept.append((again.to_local().numpy()[1:], expected(Shard(1))[1:].numpy()))
        del x, y, again, turned, back
    for view, right in kept:
        assert (view == right).all()


def _turned(placement: Placement) -> Placement:
    if isinstance(placement, Shard) and placement.dim > 0:
        return Shard(3 - placement.dim)
    return placement


def distributes_large(rank: int) -> None:
    mesh, full = init_device_mesh("cpu", (N,)), full_tensor()
    mine = full + 100 * rank
    for placement in WAYS:
        made = distribute_tensor(mine, mesh, [placement])
        assert torch.equal(made.to_local(), part_of(full, [placement], (N,), (rank,))), placement
        assert torch.equal(mine, full + 100 * rank)
        if isinstance(placement, Shard):
            made.to_local().zero_()  # not the memory of what was given
            assert torch.equal(mine, full + 100 * rank)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_large_parts_over_processes(process_pool: Any, backend: str) -> None:
    pool = process_pool(N, backend)
    pool.run(moves_large)
    pool.run(distributes_large)
