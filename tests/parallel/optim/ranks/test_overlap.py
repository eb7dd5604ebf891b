"""Steps of the sharded optimizer within backward."""

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import HookError, OptimizerError
from dure.testing import CommRecorder, run_ranks
from tests.parallel.optim.zero_models import Net, batch, equal, pair, step
from tests.thread_ranks import on_ranks

HOOKS = {"end": dist.hook_with_zero_step, "interleaved": dist.hook_with_zero_step_interleaved}


def average(group, bucket):
    """Average a bucket, into a tensor of its own."""
    total = bucket.buffer().clone()
    work = group.all_reduce(total, dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _wrap(model):
    return dist.DistributedDataParallel(model, bucket_cap_mb=0.05)


def _overlapped(module, how, **options):
    ddp = _wrap(module)
    zero = dist.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True, **options
    )
    ddp.register_comm_hook(dist.group.WORLD, HOOKS[how](average, ddp, zero))
    return ddp, zero


@pytest.mark.parametrize(
    ("n", "how", "shared"),
    [
        (1, "end", True),
        (3, "end", False),
        (3, "interleaved", False),
        (3, "interleaved", True),
    ],
)
def test_overlapped_steps_are_those_after_backward(n, how, shared):
    def body(rank):
        model, _, other, theirs = pair(
            lambda m: None, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)
        )
        ddp, ours = _overlapped(model, how, host_shared_parameters=shared)
        reference = _wrap(other)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (ours, theirs)]
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            x = batch(data)
            assert step(ddp, ours, x) == step(reference, theirs, x)  # from the first step on
            for schedule in schedules:
                schedule.step()
        ours.consolidate_state_dict()
        dist.barrier()
        return equal(model, other), len(ours.state_dict()["state"]) if rank == 0 else 9

    assert run_ranks(n, body) == [(True, 9)] * n


@pytest.mark.parametrize(("shared", "sent"), [(False, True), (True, False)])
def test_values_travel_bucket_by_bucket_or_not_at_all(shared, sent):
    def body(rank):
        ddp, zero = _overlapped(Net(), "interleaved", host_shared_parameters=shared)
        data = torch.Generator().manual_seed(rank)
        step(ddp, zero, batch(data))
        with CommRecorder() as seen:
            step(ddp, zero, batch(data))
        dist.barrier()
        return seen.counts["all_gather"], seen.counts["barrier"]

    ((gathers, barriers), _) = run_ranks(2, body)
    assert (gathers > 0) == sent
    assert barriers == 0


@on_ranks(2)
def test_hooks_before_a_step_that_is_over_are_refused(rank):
    ddp, zero = _overlapped(nn.Linear(2, 2), "end")
    zero.register_step_pre_hook(lambda *_: None)
    with pytest.raises(HookError) as caught:
        ddp(torch.ones(1, 2)).sum().backward()
    assert isinstance(caught.value.__cause__, OptimizerError)


@on_ranks(2)
def test_misuse_of_overlap_is_refused(rank):
    ddp = _wrap(nn.Linear(2, 2))
    after = dist.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(OptimizerError):
        dist.hook_with_zero_step(average, ddp, after)
    more = nn.Parameter(torch.zeros(2))
    inside = dist.ZeroRedundancyOptimizer(
        [*ddp.parameters(), more], torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    group = dist.new_group([0, 1])
    elsewhere = dist.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    with pytest.raises(OptimizerError):
        dist.hook_with_zero_step(average, elsewhere, inside)
    ddp.register_comm_hook(dist.group.WORLD, dist.hook_with_zero_step(average, ddp, inside))
    with pytest.raises(HookError) as caught:  # from backward: `more` is in no bucket
        ddp(torch.ones(1, 2)).sum().backward()
    assert isinstance(caught.value.__cause__, OptimizerError)
