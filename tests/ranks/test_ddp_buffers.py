"""DDP and the buffers of its module: whose values count, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks


def test_buffers_follow_rank_0_3_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[float], int]:
        ddp = dist.DistributedDataParallel(nn.BatchNorm1d(2))
        ddp(torch.arange(8.0).view(4, 2) * (rank + 1)).sum().backward()
        ddp.eval()
        with torch.no_grad():
            ddp(torch.ones(1, 2))
        norm = ddp.module
        assert norm.num_batches_tracked is not None
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)

    results = run_ranks(3, rank_main)
    assert results[0][1] == 1
    assert results == [results[0]] * 3


def test_buffers_stay_apart_when_not_broadcast_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(nn.BatchNorm1d(1), forward_sync_buffers=False)
        for _ in range(2):
            ddp(torch.arange(4.0).view(4, 1) * (rank + 1)).sum().backward()
        return ddp.module.running_mean.tolist()

    first, second = run_ranks(2, rank_main)
    assert second == [2 * v for v in first]


@pytest.mark.filterwarnings("ignore:.broadcast_buffers")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"broadcast_buffers": False}, [0, 1]),
        ({"forward_sync_buffers": False}, [0, 0]),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, [0, 0]),
    ],
)
def test_buffers_at_wrapping_2_ranks(options: dict[str, Any], expected: list[int]) -> None:
    def rank_main(rank: int) -> float:
        norm = nn.BatchNorm1d(1)
        assert norm.running_mean is not None
        norm.running_mean.fill_(rank)
        dist.DistributedDataParallel(norm, **options)
        return norm.running_mean.item()

    assert run_ranks(2, rank_main) == expected


def test_broadcast_buffers_is_deprecated_1_rank() -> None:
    def rank_main(rank: int) -> None:
        with pytest.warns(FutureWarning):
            dist.DistributedDataParallel(nn.Linear(1, 1), broadcast_buffers=True)

    run_ranks(1, rank_main)
