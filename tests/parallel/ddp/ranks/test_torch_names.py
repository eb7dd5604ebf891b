"""The methods of torch's DDP that begin with an underscore and that programs call anyway."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, UsageError
from dure.parallel.ddp.torch_names import sync_module_states, verify_shapes
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


@on_ranks(2)
def test_removed_hooks_leave_gradients_to_each_rank_2_ranks(rank: int) -> None:
    module = nn.Linear(1, 1, bias=False)
    dist.DistributedDataParallel(module)._remove_autograd_hooks()
    module(torch.full((1, 1), float(rank))).sum().backward()
    assert module.weight.grad.item() == [0.0, 1.0][rank]


@on_ranks(3)
def test_states_come_from_the_rank_that_is_named_3_ranks(rank: int) -> None:
    module = nn.BatchNorm1d(1)
    nn.init.constant_(module.weight, rank)
    nn.init.constant_(module.bias, rank)
    assert dist.group.WORLD is not None
    sync_module_states(module, dist.group.WORLD, 1, 2, ["bias"])
    assert (module.weight.item(), module.bias.item()) == [(2, 0), (2, 1), (2, 2)][rank]


@on_ranks(2)
def test_shapes_that_differ_are_refused_on_all_ranks_2_ranks(rank: int) -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(ModuleError):
        verify_shapes(dist.group.WORLD, [torch.zeros(2), torch.zeros(3 + rank)])


@on_ranks(2)
def test_arguments_are_moved_to_a_device(rank: int) -> None:
    ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
    (args,), (kwargs,) = ddp.to_kwargs((torch.ones(1), 2), {"x": torch.zeros(1)}, 0)
    assert (args[0].item(), args[1], kwargs["x"].item()) == (1, 2, 0)
