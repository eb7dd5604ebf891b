"""DDP's buffers: whose they are, and when they are sent."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The mean of a column on rank r is 1.5 (r + 1); a tenth of it is taken over.
        ({}, [0.15, 0.15, 0.15]),
        ({"forward_sync_buffers": False}, [0.15, 0.3, 0.45]),
    ],
)
def test_buffers_follow_rank_0_unless_forwards_do_not_send_them_3_ranks(
    options: dict[str, Any], expected: list[float]
) -> None:
    def rank_main(rank: int) -> tuple[float, int]:
        ddp: Any = dist.DistributedDataParallel(nn.BatchNorm1d(1), **options)
        ddp(torch.arange(4.0).view(4, 1) * (rank + 1)).sum().backward()
        ddp.eval()
        with torch.no_grad():
            ddp(torch.ones(1, 1))
        return ddp.module.running_mean.item(), int(ddp.module.num_batches_tracked)

    assert run_ranks(3, rank_main) == [(pytest.approx(mean), 1) for mean in expected]


@pytest.mark.filterwarnings("ignore:.broadcast_buffers")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"broadcast_buffers": False}, [0, 1]),
        ({"forward_sync_buffers": False}, [0, 0]),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, [0, 0]),
    ],
)
def test_buffers_at_wrapping_2_ranks(options: dict[str, Any], expected: list[float]) -> None:
    def rank_main(rank: int) -> float:
        norm = nn.BatchNorm1d(1)
        norm.running_mean.fill_(rank)
        dist.DistributedDataParallel(norm, **options)
        return norm.running_mean.item()

    assert run_ranks(2, rank_main) == expected
