"""The sharded optimizer on thread-ranks, against the unsharded one: not a bit may differ."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, NotInGroupError, OptimizerError
from dure.testing import CommRecorder, run_ranks
from ranks.zero_models import (
    KINDS,
    OPTIMIZERS,
    Net,
    batch,
    equal,
    pair,
    same_state,
    step,
    train_both,
)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [*((o, "straight") for o in OPTIMIZERS), ("adamw", "buckets"), ("momentum", "shared")],
)
def test_steps_and_state_are_those_of_the_unsharded_optimizer_3_ranks(optimizer, kind):
    def body(rank):
        _, ours, _, theirs = train_both(rank, optimizer, kind)
        ours.consolidate_state_dict(to=1)
        if rank == 1:
            return same_state(ours.state_dict(), theirs.state_dict())
        with pytest.raises(OptimizerError):
            ours.state_dict()
        return True

    assert all(run_ranks(3, body))


@pytest.mark.parametrize(
    ("n", "kind"),
    [(1, "shared"), (2, "straight"), (2, "shared"), (4, "buckets"), (12, "straight")],
)
def test_any_number_of_ranks_also_more_than_parameters(n, kind):
    def body(rank):
        _, ours, _, theirs = train_both(rank, "adamw", kind, grouped=False)
        ours.consolidate_state_dict()
        return rank != 0 or same_state(ours.state_dict(), theirs.state_dict())

    assert all(run_ranks(n, body))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_frozen_parameters_and_closures(kind):
    def body(rank):
        model, other = Net(), Net()
        for m in (model, other):
            m.mid.requires_grad_(False)
        ours = dist.ZeroRedundancyOptimizer(
            m_params(model), torch.optim.Adam, lr=0.01, **KINDS[kind]
        )
        theirs = torch.optim.Adam(m_params(other), lr=0.01)
        data = torch.Generator().manual_seed(2)
        both = ((model, ours), (other, theirs))
        for turn in range(4):
            if turn == 2:  # unfrozen, and given to the optimizer; another frozen meanwhile
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

                loss = o.step(closure)
                assert loss is not None
                losses.append(loss.item())
            assert losses[0] == losses[1]
            dist.barrier()
            assert equal(model, other)
        ours.consolidate_state_dict()
        return rank > 0 or same_state(ours.state_dict(), theirs.state_dict())

    def m_params(m):
        skipped = {id(p) for p in m.mid.parameters()}
        return [p for p in m.parameters() if id(p) not in skipped]

    assert all(run_ranks(2, body))


def test_parameters_frozen_at_first_are_trained_once_they_may():
    def body(rank):
        model, ours, other, theirs = pair(
            lambda m: dist.ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, lr=0.1),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        )
        data = torch.Generator().manual_seed(3)
        for trained in (False, True, True):
            x = batch(data)
            for m in (model, other):
                m.up.requires_grad_(trained)
            assert step(model, ours, x) == step(other, theirs, x)
        return equal(model, other)

    assert run_ranks(3, body) == [True] * 3


def test_named_parameters_are_named_in_groups_and_errors():
    def body(rank):
        model = nn.Linear(3, 4 + rank)
        with pytest.raises(ModuleError) as caught:
            dist.ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        ours = dist.ZeroRedundancyOptimizer(
            nn.Linear(3, 4).named_parameters(), torch.optim.SGD, lr=0.1
        )
        return caught.value.parameters, ours.param_groups[0]["param_names"]

    assert run_ranks(2, body) == [(("weight",), ["weight", "bias"])] * 2


def test_ties_that_only_some_ranks_have_are_refused():
    def body(rank):
        a = nn.Parameter(torch.zeros(4))
        b = nn.Parameter(a.data.view(2, 2) if rank else torch.zeros(2, 2))
        with pytest.raises(ModuleError) as caught:
            dist.ZeroRedundancyOptimizer([a, b], torch.optim.SGD, lr=0.1)
        return caught.value.parameters

    assert run_ranks(2, body) == [("param_groups[0].params[1]",)] * 2


@pytest.mark.parametrize("kind", ["straight", "shared"])
def test_views_of_one_memory_stay_so(kind):
    def make():
        base = nn.Parameter(torch.arange(6.0))
        others = (base.data[2:4], torch.ones(2, 3).t(), torch.empty(0, 2))
        return [base, *map(nn.Parameter, others)]

    def body(rank):
        mine, theirs = make(), make()
        sharded = dist.ZeroRedundancyOptimizer(mine, torch.optim.SGD, lr=0.1, **KINDS[kind])
        plain = torch.optim.SGD(theirs, lr=0.1)
        for params, optimizer in ((mine, sharded), (theirs, plain)):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        dist.barrier()
        assert mine[0].data_ptr() + 8 == mine[1].data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return mine[2].stride()

    assert run_ranks(2, body) == [(1, 3)] * 2


def test_bad_parameters_are_refused_by_type():
    def body(rank):
        leaf = nn.Parameter(torch.zeros(3))
        sparse = torch.eye(3).to_sparse().requires_grad_()
        for wrong in (leaf, [leaf * 2], [sparse], ["x"], [], [{"params": [leaf * 2]}], 3):
            with pytest.raises(OptimizerError):
                dist.ZeroRedundancyOptimizer(wrong, torch.optim.SGD, lr=0.1)  # pyright: ignore
        with pytest.raises(OptimizerError):
            dist.ZeroRedundancyOptimizer(
                [leaf],
                torch.optim.SGD,
                lr=0.1,
                parameters_as_bucket_view=True,
                host_shared_parameters=True,
            )
        with pytest.raises(OptimizerError):  # an optimizer instead of its class
            dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD([leaf]))  # pyright: ignore
        ours = dist.ZeroRedundancyOptimizer([leaf], torch.optim.SGD, lr=0.1)
        with pytest.raises(OptimizerError):
            ours.add_param_group({"params": [leaf]})
        with pytest.raises(OptimizerError):
            copy.deepcopy(ours)
        with pytest.raises(NotInGroupError):
            ours.consolidate_state_dict(to=2)
        with pytest.raises(OptimizerError):
            ours.load_state_dict({"state": {}, "param_groups": []})
        return True

    assert all(run_ranks(2, body))


def test_shared_parameters_refuse_what_evaluates_between_updates():
    def body(rank):
        p = nn.Parameter(torch.ones(8))
        ours = dist.ZeroRedundancyOptimizer(
            [p], torch.optim.LBFGS, lr=0.1, host_shared_parameters=True
        )

        def closure():
            ours.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        if rank == 0:  # who owns it; the other has nothing to evaluate twice
            with pytest.raises(OptimizerError):
                ours.step(closure)
        return True

    assert run_ranks(1, body) == [True]


def test_an_older_graph_notices_that_parameters_have_changed():
    def body(rank, kind):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        ours = dist.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, **KINDS[kind]
        )
        loss = model(torch.ones(1, 4)).sum()
        loss.backward(retain_graph=True)
        ours.step()
        with pytest.raises(RuntimeError):
            loss.backward()
        dist.barrier()
        return True

    for kind in KINDS:
        assert all(run_ranks(2, body, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_communicates_is_known_2_ranks(kind):
    def body(rank):
        model = Net()
        ours = dist.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, **KINDS[kind]
        )
        step(model, ours, batch(torch.Generator()))
        with CommRecorder() as seen:
            step(model, ours, batch(torch.Generator()))
        dist.barrier()
        return seen.ops

    expected = {
        "straight": ["all_gather"] * 2,  # one large parameter, and all others packed
        "buckets": ["all_gather"],
        "shared": ["all_reduce", "barrier"],  # two collectives, of 4 bytes and of none
    }
    assert run_ranks(2, body) == [expected[kind]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_join_ranks_without_inputs_step_along_3_ranks(kind):
    def body(rank):
        model = Net()
        ddp = dist.DistributedDataParallel(model)
        ours = dist.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=0.01, **KINDS[kind]
        )
        data = torch.Generator().manual_seed(rank)
        with dist.Join([ddp, ours]):
            for _ in range(2 + rank):
                step(ddp, ours, batch(data))
        dist.barrier()
        everyone = [torch.empty(0)] * 3
        dist.all_gather_object(everyone, [p.detach().clone() for p in model.parameters()])
        return [
            torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True)
        ]

    assert all(all(same) for same in run_ranks(3, body))


def test_views_of_each_other_do_not_go_into_buckets_2_ranks():
    def body(rank):
        base = torch.arange(6.0)
        params = [nn.Parameter(base[:4]), nn.Parameter(base[2:])]
        with pytest.raises(OptimizerError):
            dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, **KINDS["buckets"])

    run_ranks(2, body)


def _frozen_with_a_gradient(rank, kind):
    params = [nn.Parameter(torch.ones(3), requires_grad=i == 0) for i in range(3)]
    zero = dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5, **KINDS[kind])
    for p in params:
        p.grad = torch.ones_like(p)
    dist.barrier()
    zero.step()
    return [p.tolist() for p in params]


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_parameter_with_a_gradient_is_updated_as_torch_does_2_ranks(kind):
    assert run_ranks(2, _frozen_with_a_gradient, kind) == [[[0.5] * 3] * 3] * 2


def _with_gaps_later(rank):
    params = [nn.Parameter(torch.ones(200, 200)) for _ in range(2)]
    zero = dist.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5)
    for p in params:
        p.data = torch.ones(200, 400)[:, ::2]
        p.grad = torch.ones_like(p)
    zero.step()
    return [bool((p == 0.5).all()) for p in params]


def test_a_parameter_may_get_gaps_after_the_plan_2_ranks():
    assert run_ranks(2, _with_gaps_later) == [[True, True]] * 2
