"""Blocks that switch what DTensors accept: `implicit_replication` and `strict`."""

from __future__ import annotations

import pytest
import torch

from dure.errors import PlacementError, UsageError
from dure.tensor import DTensor, Shard, distribute_tensor, init_device_mesh, strict
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


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_plain_tensor_of_one_element_is_a_number(shape: tuple[int, ...]) -> None:
    full = torch.arange(12.0).reshape(4, 3)

    def body(rank: int) -> None:
        x = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)])
        scale = torch.full(shape, 2.0, requires_grad=True)
        (x * scale).sum().backward()
        assert isinstance(scale.grad, DTensor)
        assert torch.equal(scale.grad.full_tensor(), torch.full(shape, 66.0))
        raised = torch.clamp(x, min=torch.full(shape, 5.0))
        assert isinstance(raised, DTensor) and raised.placements == (Shard(0),)
        assert torch.equal(raised.full_tensor(), full.clamp(min=5.0))

    run_ranks(2, body)


def test_strict_refuses_what_would_be_gathered() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
        with strict(), pytest.raises(PlacementError):
            torch.ops.aten._linalg_det.default(x)

    run_ranks(2, body)
