"""DDP's names with an underscore, as torch's class has them."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.testing import CommRecorder
from tests.thread_ranks import on_ranks

Futures = list[torch.futures.Future[list[torch.Tensor]]]


def averages(group: dist.ProcessGroup, buffers: dict[str, torch.Tensor]) -> Futures:
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    # `.data`: autograd, which has saved the buffer, need not see that it changes.
    mean = buffers["running_mean"].data
    work = group.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
    return [work.get_future()]


@on_ranks(2)
def test_buffer_hook_acts_in_place_of_the_broadcast_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(nn.BatchNorm1d(1, momentum=1.0))
    with pytest.raises(UsageError):
        ddp._register_buffer_comm_hook(None, 3)  # pyright: ignore[reportArgumentType]
    ddp._register_buffer_comm_hook(ddp.process_group, averages)
    with CommRecorder() as seen:
        ddp(torch.arange(4.0).reshape(4, 1) + rank).sum().backward()
    assert (seen.ops, ddp.module.running_mean.item()) == (["all_reduce"] * 2, 2.0)
    # Two reductions: the hook's, and that of the gradients. The ranks' means are 1.5 and 2.5.
