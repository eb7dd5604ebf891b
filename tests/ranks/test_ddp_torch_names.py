"""The methods of torch's DDP that have an underscore and are called all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, UsageError
from dure.parallel.ddp.torch_names import sync_module_states, verify_shapes
from dure.testing import CommRecorder, run_ranks

Futures = list[torch.futures.Future[torch.Tensor]]


def averages(group: dist.ProcessGroup, buffers: dict[str, torch.Tensor]) -> Futures:
    assert list(buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    # `.data`: autograd, which has saved the buffer, need not see that it changes.
    mean = buffers["1.running_mean"].data
    work = group.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    return [work.get_future()]


def test_buffer_hook_acts_in_place_of_the_broadcast_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3)
        ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), norm))
        ddp._register_buffer_comm_hook(ddp.process_group, averages)
        with CommRecorder() as seen:
            ddp(torch.arange(8.0).reshape(4, 2) + rank).sum().backward()
        assert seen.ops == ["all_reduce"] * 2  # the hook's, and that of the gradients
        mean = norm.running_mean
        assert mean is not None
        means = [torch.empty_like(mean) for _ in range(2)]
        dist.all_gather(means, mean)
        assert torch.equal(means[0], means[1])
        assert mean.abs().sum() > 0

    run_ranks(2, rank_main)


def test_buffer_hook_that_cannot_be_called_is_refused_1_rank() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(UsageError):
            ddp._register_buffer_comm_hook(None, 3)  # pyright: ignore[reportArgumentType]

    run_ranks(1, rank_main)


def test_removed_hooks_leave_gradients_to_each_rank_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        module = nn.Linear(1, 1, bias=False)
        ddp = dist.DistributedDataParallel(module)
        ddp._remove_autograd_hooks()
        module(torch.full((1, 1), float(rank))).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.item() == rank

    run_ranks(2, rank_main)


def test_states_come_from_the_rank_that_is_named_3_ranks() -> None:
    def rank_main(rank: int) -> None:
        module = nn.BatchNorm1d(2)
        with torch.no_grad():
            module.weight.fill_(rank)
            module.bias.fill_(rank)
        group = dist.group.WORLD
        assert group is not None
        sync_module_states(module, group, 1, 2, ["bias"])
        assert module.weight.tolist() == [2, 2]
        assert module.bias.tolist() == [rank] * 2

    run_ranks(3, rank_main)


def test_shapes_that_differ_are_refused_on_all_ranks_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(ModuleError):
            verify_shapes(group, [torch.zeros(2), torch.zeros(3 + rank)])

    run_ranks(2, rank_main)
