"""DDP in a `Join`: uneven inputs give what one process with the same samples gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import CommError, ModuleError, PeerLost, UnevenInputs
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import Branches
from tests.parallel.ddp.join_models import (
    Params,
    assert_all_close,
    batches_of,
    loss_of,
    make_net,
    train_alone,
)
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


def averaging(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future()


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize(
    ("counts", "hook"),
    [
        ((3,), None),
        ((2, 3), None),
        ((3, 0), None),
        ((0, 0, 1), None),
        ((2, 0, 3), averaging),
        ((3, 0, 2, 3, 1), None),
    ],
)
def test_uneven_inputs_train_as_one_process_does(counts, hook, by_all):
    def rank_main(rank: int) -> tuple[Params, Params]:
        ddp = dist.DistributedDataParallel(make_net(), bucket_cap_mb=1e-4)
        if hook is not None:
            ddp.register_comm_hook(dist.group.WORLD, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            with ddp.join(divide_by_initial_world_size=by_all, optimizer=optimizer):
                for x in batches_of(rank, counts[rank], epoch):
                    loss_of(ddp(x)).backward()
                    optimizer.step()
                    optimizer.zero_grad()  # at the end: shadowing must not leave gradients either
        assert [p.grad for p in ddp.parameters()] == [None] * 4
        momenta = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
        return [p.detach() for p in ddp.parameters()], momenta

    results = run_ranks(len(counts), rank_main)
    assert_all_close([params for params, _ in results], train_alone(counts, by_all, 2))
    for params, momenta in results:
        assert all(map(torch.equal, params + momenta, results[0][0] + results[0][1]))


def test_only_forwards_that_communicate_count_3_ranks():
    """Accumulation, forwards without a backward, several forwards before one, differing by rank."""

    def rank_main(rank: int) -> Params:
        ddp = dist.DistributedDataParallel(make_net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for x in batches_of(rank, rank + 1):
                optimizer.zero_grad()
                with ddp.no_sync():
                    for _ in range(rank):  # as many as it likes
                        loss_of(ddp(x)).backward()
                ddp(x)
                (loss_of(ddp(x)) + loss_of(ddp(x))).backward()
                optimizer.step()
        return [p.detach() for p in ddp.parameters()]

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [batches_of(rank, rank + 1) for rank in range(3)]
    for step in range(3):
        optimizer.zero_grad()
        losses = [(r + 2) * loss_of(net(data[r][step])) for r in range(3) if step <= r]
        (torch.stack(losses).sum() / 3).backward()
        optimizer.step()
    assert_all_close(run_ranks(3, rank_main), [p.detach() for p in net.parameters()])


def test_shadow_neither_uses_nor_misses_a_parameter_3_ranks():
    def rank_main(rank: int) -> tuple[bool, bool]:
        ddp = dist.DistributedDataParallel(Branches(), find_unused_parameters=True)
        assert not ddp._join_config.enable
        with ddp.join():
            assert ddp._join_config == (True, False, True)
            for _ in range(rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 2), "left").backward()
        return ddp.module.left.weight.grad is None, ddp.module.right.weight.grad is None

    # Only the rank that trained to the end still has a gradient.
    assert run_ranks(3, rank_main) == [(True, True), (True, True), (False, True)]


def test_buffers_come_from_a_rank_that_trains_and_end_equal_3_ranks():
    counts = (1, 3, 2)

    def rank_main(rank: int) -> tuple[list[torch.Tensor], int, int]:
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        ddp = dist.DistributedDataParallel(net)
        with CommRecorder(rank=rank) as seen, ddp.join():
            for x in batches_of(rank, counts[rank]):
                loss_of(ddp(x)).backward()
        state = [t.clone() for t in net.state_dict().values()]
        return state, seen.counts["all_reduce"], seen.counts["broadcast"]

    results = run_ranks(3, rank_main)
    for state, reductions, broadcasts in results:
        # A step announces twice: the broadcast of buffers (floats, numbers), and the bucket.
        assert reductions == 3 * 3 + 1
        # In the end the last joiner's module: its floats, its numbers.
        assert broadcasts == 3 * 2 + 2
        assert state[-1] == 3  # batches tracked
        assert all(map(torch.equal, state, results[1][0]))


@on_ranks(4)
def test_early_termination_is_named_on_all_ranks_and_the_group_lives_on_4_ranks(rank):
    counts = (3, 1, 5, 1)

    net = nn.Sequential(nn.Linear(3, 2), dist.SyncBatchNorm(2)).double()
    ddp = dist.DistributedDataParallel(net)
    seen: list[torch.Tensor] = []

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for x in batches_of(rank, counts[rank]):
                seen.append(ddp(x))
                loss_of(seen[-1]).backward()

    with pytest.raises(UnevenInputs) as caught:
        train()
    loss_of(ddp(batches_of(rank, 1)[0])).backward()  # out of the context, and in step
    assert caught.value.rank == rank
    assert (caught.value.ranks, len(seen)) == ((1, 3), 1)


@on_ranks(2)
def test_even_inputs_terminate_well_though_early_termination_would_throw_2_ranks(rank):
    ddp = dist.DistributedDataParallel(make_net())
    with CommRecorder(rank=rank) as seen, ddp.join(throw_on_early_termination=True):
        for x in batches_of(rank, 3):
            loss_of(ddp(x)).backward()
    assert seen.counts["all_reduce"] == 3 * 2 + 1


def test_layers_that_communicate_cannot_be_shadowed_and_are_named_2_ranks():
    def rank_main(rank: int) -> ModuleError:
        ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), dist.SyncBatchNorm(2)))
        with pytest.raises(ModuleError) as caught, ddp.join():
            pytest.fail("entered")
        return caught.value

    for error in run_ranks(2, rank_main):
        assert "1 (SyncBatchNorm)" in error.seen


@pytest.mark.parametrize("failing_step", [0, 2])
def test_rank_that_raises_is_lost_to_the_others_at_once_3_ranks(failing_step):
    counts = (1, 3, 4)  # rank 0 shadows, rank 2 trains, when rank 1 raises
    ended = threading.Barrier(3)

    def rank_main(rank: int) -> Exception:
        ddp = dist.DistributedDataParallel(make_net())
        try:
            with ddp.join():
                for step, x in enumerate(batches_of(rank, counts[rank])):
                    if rank == 1 and step == failing_step:
                        raise KeyError("mine")
                    loss_of(ddp(x)).backward()
        except (KeyError, CommError) as error:
            ended.wait(PATIENCE_S)  # no rank leaves the group before all have raised
            return error
        raise AssertionError("no error")

    first, second, third = run_ranks(3, rank_main)
    assert isinstance(second, KeyError)
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert error.peer == 1
