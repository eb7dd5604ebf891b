"""Blocks that switch what DTensors accept: `implicit_replication` and `strict`."""

from __future__ import annotations

import pytest
import torch

from dure.errors import PlacementError, UsageError
from dure.tensor import Shard, distribute_tensor, init_device_mesh, strict
from dure.tensor.experimental import implicit_replication
from dure.testing import run_ranks


def test_plain_tensors_are_replicated_within_the_block_alone() -> None:
    full = torch.arange(12.0).reshape(4, 3)

    def body(rank: int) -> None:
        x = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)])
        with implicit_replication():
            assert torch.equal((x + full).full_tensor(), full * 2)  # pyright: ignore
        with pytest.raises(UsageError):
            _ = x + full

    run_ranks(2, body)


def test_strict_refuses_what_would_be_gathered() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
        with strict(), pytest.raises(PlacementError):
            torch.ops.aten._linalg_det.default(x)

    run_ranks(2, body)
