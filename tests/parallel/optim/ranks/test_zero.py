"""The sharded optimizer on thread-ranks, against the unsharded one: not a bit may differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import HookError, NotInGroupError, OptimizerError
from dure.testing import CommRecorder, run_ranks
from tests.parallel.optim.zero_models import (
    KINDS,
    OPTIMIZERS,
    Net,
    batch,
    equal,
    groups_of,
    pair,
    same,
    step,
    train_both,
)
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize(
    ("n", "optimizer", "kind", "grouped"),
    [
        *((3, optimizer, "straight", True) for optimizer in OPTIMIZERS),
        (3, "adamw", "buckets", True),
        (3, "momentum", "shared", True),
        (1, "adamw", "shared", False),
        (2, "adamw", "straight", False),
        (2, "adamw", "buckets", False),
        (12, "adamw", "straight", False),  # more ranks than parameters
    ],
)
def test_steps_and_state_are_those_of_the_unsharded_optimizer(n, optimizer, kind, grouped):
    def body(rank):
        _, ours, _, theirs = train_both(rank, optimizer, kind, grouped)
        ours.consolidate_state_dict(to=n - 1)
        if rank == n - 1:
            return same(ours.state_dict(), theirs.state_dict())
        with pytest.raises(OptimizerError):
            ours.state_dict()
        return True

    assert all(run_ranks(n, body))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_frozen_parameters_and_closures(kind):
    def body(rank):
        def made(model, optimizer, **options):
            model.mid.requires_grad_(False)
            trained = [p for p in model.parameters() if p.requires_grad]
            return model, optimizer(trained, lr=0.01, **options)

        def ours(params, **options):
            return dist.ZeroRedundancyOptimizer(params, torch.optim.Adam, **options)

        both = made(Net(), ours, **KINDS[kind]), made(Net(), torch.optim.Adam)
        data = torch.Generator().manual_seed(2)
        for turn in range(3):
            if turn == 1:  # one is unfrozen and given to the optimizer, another one frozen
                for m, o in both:
                    m.mid.requires_grad_(True)
                    m.up.bias.requires_grad_(False)
                    o.add_param_group({"params": list(m.mid.parameters()), "lr": 0.02})
            x = batch(data)
            losses = []
            for m, o in both:

                def closure(m=m, o=o, x=x):
                    o.zero_grad()
                    loss = m(x).square().mean()
                    loss.backward()
                    return loss

                losses.append(o.step(closure).item())
            assert losses[0] == losses[1]
            dist.barrier()
            assert equal(both[0][0], both[1][0])
        both[0][1].consolidate_state_dict()
        return rank > 0 or same(both[0][1].state_dict(), both[1][1].state_dict())

    assert all(run_ranks(2, body))

    # The step takes 1 from the first one's elements, and from two of them once more.


@on_ranks(2)
def test_bad_parameters_are_refused_by_type(rank):
    leaf = nn.Parameter(torch.zeros(3))
    sparse = torch.eye(3).to_sparse().requires_grad_()
    wrong: Any
    for wrong in (leaf, [leaf * 2], [sparse], ["x"], [], [{"params": [leaf * 2]}], 3):
        with pytest.raises(OptimizerError):
            dist.ZeroRedundancyOptimizer(wrong, torch.optim.SGD, lr=0.1)
    both = {**KINDS["buckets"], **KINDS["shared"]}
    with pytest.raises(OptimizerError):
        dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD, lr=0.1, **both)
    with pytest.raises(OptimizerError):  # an optimizer instead of its class
        dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD([leaf]))  # pyright: ignore[reportArgumentType]
    ours = dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD, lr=0.1)
    with pytest.raises(OptimizerError):
        ours.add_param_group({"params": [leaf]})
    with pytest.raises(OptimizerError):
        copy.deepcopy(ours)
    with pytest.raises(NotInGroupError):
        ours.consolidate_state_dict(to=2)
    with pytest.raises(OptimizerError):
        ours.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_hooks_of_steps_run_once_around_the_update_of_all_ranks(rank, kind):
    model, seen = nn.Linear(2, 2), []
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.5, **KINDS[kind]
    )

    def before(one, args, kwargs):
        assert one is optimizer and (args[1:], kwargs) == ((), {})
        for parameter in model.parameters():
            parameter.grad.mul_(2)

    def after(one, args, kwargs):
        seen.append([p.flatten().tolist() for p in model.parameters()])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == [[[0.0] * 4, [0.0] * 2]]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("straight", ["all_gather"] * 2),  # one large parameter, and all others packed
        ("buckets", ["all_gather"]),
        ("shared", ["all_reduce", "barrier"]),  # of 4 bytes and of none
    ],
)
@on_ranks(2)
def test_a_step_communicates_once_or_twice_2_ranks(rank, kind, expected):
    model = Net()
    ours = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **KINDS[kind])
    step(model, ours, batch(torch.Generator()))
    with CommRecorder() as seen:
        step(model, ours, batch(torch.Generator()))
    dist.barrier()
    assert seen.ops == expected


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_an_older_graph_notices_that_another_rank_has_changed_a_parameter_2_ranks(rank, kind):
    weight = nn.Parameter(torch.ones(300, 300))  # too large to be packed
    ours = dist.ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1, **KINDS[kind])
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError):
        loss.backward()
    dist.barrier()


def test_parameters_frozen_at_first_are_trained_once_they_may():
    def frozen(model):
        model.up.requires_grad_(False)
        return model.parameters()

    def body(rank):
        model, ours, other, theirs = pair(
            lambda m: dist.ZeroRedundancyOptimizer(frozen(m), torch.optim.SGD, lr=0.1),
            lambda m: torch.optim.SGD(frozen(m), lr=0.1),
        )
        data = torch.Generator().manual_seed(3)
        for trained in (False, True):
            x = batch(data)
            for m in (model, other):
                m.up.requires_grad_(trained)
            assert step(model, ours, x) == step(other, theirs, x)
        return equal(model, other)

    assert run_ranks(3, body) == [True] * 3


@on_ranks(2)
def test_views_of_each_other_do_not_go_into_buckets_2_ranks(rank):
    base = torch.arange(6.0)
    params = [nn.Parameter(base[:4]), nn.Parameter(base[2:])]
    with pytest.raises(OptimizerError):
        dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, **KINDS["buckets"])


# ---------------------------------------------------------------- inside backward


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


# ---------------------------------------------------------------- state


def test_state_lives_once():
    def body(rank):
        _, ours, _, theirs = train_both(rank, "adamw", "straight")
        parts = ours.local_state_dict()["state"]
        size = sum(e["exp_avg"].numel() for e in parts.values())
        return list(parts), size, sum(e["exp_avg"].numel() for e in theirs.state.values())

    results = run_ranks(3, body)
    assert sorted(number for numbers, _, _ in results for number in numbers) == list(range(9))
    assert sum(size for _, size, _ in results) == results[0][2]


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_another_world_size_and_of_no_sharding_is_loaded(kind):
    def save(rank):
        model, ours, _, _ = train_both(rank, "adamw", "straight")
        ours.consolidate_state_dict()
        return copy.deepcopy((model.state_dict(), ours.state_dict())) if rank == 0 else None

    def load(rank, saved):
        values, state = copy.deepcopy(saved)  # loading takes the tensors as they are
        cls, options = OPTIMIZERS["adamw"]
        model, ours, other, theirs = pair(
            lambda m: dist.ZeroRedundancyOptimizer(groups_of(m), cls, **KINDS[kind], **options),
            lambda m: cls(groups_of(m), **options),
        )
        model.load_state_dict(values)
        dist.barrier()
        ours.load_state_dict(state)
        other.load_state_dict(values)
        theirs.load_state_dict(copy.deepcopy(state))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < options["lr"]
        data = torch.Generator().manual_seed(5)
        for _ in range(2):
            x = batch(data)
            assert step(model, ours, x) == step(other, theirs, x)
        ours.consolidate_state_dict()
        dist.barrier()
        return equal(model, other) and (rank > 0 or same(ours.state_dict(), theirs.state_dict()))

    saved = run_ranks(2, save)[0]
    assert saved is not None
    assert all(run_ranks(3, load, saved))
    assert None not in saved[1]["state"].values()  # loading leaves the state as it was


def three_parameters():
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    for p in params:
        p.grad = p.detach().clone()
    return params


@on_ranks(2)
def test_hooks_of_the_state_run_once_it_is_asked_for(rank):
    zero, seen = dist.ZeroRedundancyOptimizer(three_parameters(), torch.optim.SGD, momentum=0.9), []
    zero.step()
    zero.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state["state"])))
    zero.consolidate_state_dict(0)
    assert seen == []
    if rank == 0:
        zero.state_dict()
        assert seen == [[0, 1, 2]]
