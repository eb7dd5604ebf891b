"""DDP's buffers: whose they are, and when they are sent."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The mean of a column on rank r is 1.5 (r + 1); a tenth of it is taken over.
        ({}, [0.15, 0.15, 0.15]),
        ({"forward_sync_buffers": False}, [0.15, 0.3, 0.45]),
    ],
)
def test_buffers_follow_rank_0_unless_forwards_do_not_send_them_3_ranks(options, expected):
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
def test_buffers_at_wrapping_2_ranks(options, expected):
    def rank_main(rank: int) -> float:
        norm = nn.BatchNorm1d(1)
        norm.running_mean.fill_(rank)
        dist.DistributedDataParallel(norm, **options)
        return norm.running_mean.item()

    assert run_ranks(2, rank_main) == expected


# --------------------------------------------------------------------------------------------------
# DDP's names with an underscore, as torch's class has them.


Futures = list[torch.futures.Future[list[torch.Tensor]]]


def averages(group: dist.ProcessGroup, buffers: dict[str, torch.Tensor]) -> Futures:
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    # `.data`: autograd, which has saved the buffer, need not see that it changes.
    mean = buffers["running_mean"].data
    work = group.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
    return [work.get_future()]


@on_ranks(2)
def test_buffer_hook_acts_in_place_of_the_broadcast_2_ranks(rank):
    ddp = dist.DistributedDataParallel(nn.BatchNorm1d(1, momentum=1.0))
    with pytest.raises(UsageError):
        ddp._register_buffer_comm_hook(None, 3)  # pyright: ignore[reportArgumentType]
    ddp._register_buffer_comm_hook(ddp.process_group, averages)
    with CommRecorder() as seen:
        ddp(torch.arange(4.0).reshape(4, 1) + rank).sum().backward()
    assert (seen.ops, ddp.module.running_mean.item()) == (["all_reduce"] * 2, 2.0)
    # Two reductions: the hook's, and that of the gradients. The ranks' means are 1.5 and 2.5.
