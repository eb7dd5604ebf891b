"""Redistribution and `distribute_tensor` of parts so large that they lie in shared memory."""

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


def part_of(whole: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    """What `rank` has: a part, the whole, or a term: rank + 1 times the whole."""
    if isinstance(placement, Shard):
        return whole.tensor_split(n, placement.dim)[rank]
    return whole * (rank + 1) if isinstance(placement, Partial) else whole


def moves_large(rank: int) -> None:
    """Parts of more than 1 MiB, whose results lie in memory that the ranks share."""
    n = 4
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(2**21).remainder(1021).float().reshape(16, 512, 256)
    kept: list[tuple[Any, Any]] = []
    ways = [Shard(0), Shard(1), Shard(2), Replicate()]
    for old, new in itertools.product([*ways, Partial()], ways):
        value = whole * 10 if isinstance(old, Partial) else whole  # 1 + 2 + 3 + 4
        mine = part_of(whole, old, n, rank).clone()
        x = DTensor.from_local(mine, mesh, [old])
        y = x.redistribute(placements=[new])
        assert torch.equal(y.to_local(), part_of(value, new, n, rank)), (old, new)
        assert torch.equal(mine, part_of(whole, old, n, rank))
        again = y.redistribute(placements=[Shard(1)])  # out of shared memory
        turned = DTensor.from_local(mine.transpose(1, 2), mesh, [_turned(old)])
        back = turned.redistribute(placements=[_turned(new)]).to_local()
        assert torch.equal(back, part_of(value, new, n, rank).transpose(1, 2))
        # A view keeps the memory, whatever else is freed and used again.
        kept.append((y.to_local()[1:], part_of(value, new, n, rank)[1:]))
        kept.append((again.to_local().numpy()[1:], part_of(value, Shard(1), n, rank)[1:].numpy()))
        del x, y, again, turned, back
    for view, expected in kept:
        assert (view == expected).all()


def _turned(placement: Placement) -> Placement:
    if isinstance(placement, Shard) and placement.dim > 0:
        return Shard(3 - placement.dim)
    return placement


def distributes_large(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(2**21).remainder(1021).float().reshape(16, 512, 256)
    mine = whole + 100 * rank
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        made = distribute_tensor(mine, mesh, [placement])
        assert torch.equal(made.to_local(), part_of(whole, placement, 4, rank)), placement
        assert torch.equal(mine, whole + 100 * rank)
        if isinstance(placement, Shard):
            made.to_local().zero_()  # not the memory of what was given
            assert torch.equal(mine, whole + 100 * rank)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_large_parts_over_processes(process_pool: Any, backend: str) -> None:
    pool = process_pool(4, backend)
    pool.run(moves_large)
    pool.run(distributes_large)
