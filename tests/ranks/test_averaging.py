"""Averaged models: when, over whom, in how many reductions, and what an outer optimizer makes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.parallel.averaging import packing
from dure.testing import CommRecorder, run_ranks


def with_gradients(*values: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.tensor([value])) for value in values]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    return parameters


def test_periodic_averager_acts_after_the_warmup_at_its_period_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        averager = dist.PeriodicModelAverager(period=3, warmup_steps=2)
        acted: list[int] = []
        for step in range(10):
            parameters = with_gradients(float(rank))
            averager.average_parameters(parameters)
            if parameters[0].item() == 0.5:
                acted.append(step)
        assert acted == [2, 5, 8]

    run_ranks(2, rank_main)


def test_hierarchy_averages_over_the_largest_group_that_is_due_4_ranks() -> None:
    def rank_main(rank: int) -> None:
        averager = dist.HierarchicalModelAverager({2: 2, 4: 4})
        seen: list[float] = []
        for _ in range(5):
            parameters = with_gradients(float(rank))
            averager.average_parameters(parameters)
            seen.append(parameters[0].item())
        pair = 0.5 if rank < 2 else 2.5
        assert seen == [1.5, rank, pair, rank, 1.5]

    run_ranks(4, rank_main)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dist.PeriodicModelAverager(period=0),
        lambda: dist.PeriodicModelAverager(period=2, warmup_steps=-1),
        lambda: dist.HierarchicalModelAverager({}),
        lambda: dist.HierarchicalModelAverager({2: 3}),
        lambda: dist.HierarchicalModelAverager({4: 1, 2: 2}),
    ],
)
def test_impossible_schedules_are_refused_2_ranks(make: Callable[[], object]) -> None:
    def rank_main(_: int) -> None:
        with pytest.raises(UsageError):
            make()

    run_ranks(2, rank_main)


def test_many_tensors_go_in_few_reductions_and_come_back_exact_3_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "PIECE_BYTES", 64)

    def rank_main(rank: int) -> None:
        shapes = [(2, 3), (5,), (), (4, 4), (0,)]
        tensors = [torch.full(shape, 3.0 * rank) for shape in shapes]
        tensors += [torch.full((3,), rank, dtype=torch.float64)]
        group = dist.group.WORLD
        assert group is not None
        with CommRecorder() as seen:
            packing.average_(tensors, group)
        # float32: 6 + 5 + 1 numbers fill a piece of 64 bytes, 16 another; and one of float64
        assert [(e.op, e.nbytes) for e in seen.events] == [
            ("all_reduce", n) for n in (12 * 4, 16 * 4, 3 * 8)
        ]
        assert all(bool((t == (1 if t.dtype == torch.float64 else 3)).all()) for t in tensors)

    run_ranks(3, rank_main)


def trained(
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], rank: int, steps: int
) -> nn.Linear:
    """Train a small layer, on other data on each rank."""
    module = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    optimizer = wrap(torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).mul_(0.1 * (rank + 1)) + step
        module(x.sin()).square().sum().backward()
        optimizer.step()
    return module


def test_diloco_with_a_plain_outer_step_is_averaging_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        def averaging(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
            averager = dist.PeriodicModelAverager(period=3, warmup_steps=2)
            return dist.PostLocalSGDOptimizer(inner, averager)

        def outer(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
            return dist.DiLoCo(inner, period=3, lr=1.0)

        expected, got = trained(averaging, rank, 6), trained(outer, rank, 6)
        torch.testing.assert_close(got.weight, expected.weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.bias, expected.bias, rtol=1e-12, atol=1e-12)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_goes_on_from_its_state_in_the_middle_of_a_round_2_ranks(fragments: int) -> None:
    def rank_main(rank: int) -> None:
        def make(module: nn.Module) -> dist.DiLoCo:
            inner = torch.optim.AdamW(module.parameters(), lr=0.1)
            return dist.DiLoCo(inner, period=4, fragments=fragments)

        def steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
            for step in numbers:
                optimizer.zero_grad()
                module(torch.full((1, 2), rank + step + 1.0)).sum().square().backward()
                optimizer.step()

        torch.manual_seed(0)
        module = nn.Linear(2, 2)
        optimizer = make(module)
        steps(module, optimizer, range(6))
        again = nn.Linear(2, 2)
        other = make(again)
        again.load_state_dict(copy.deepcopy(module.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(module, optimizer, range(6, 13))
        steps(again, other, range(6, 13))
        assert torch.equal(module.weight, again.weight)
        assert torch.equal(module.bias, again.bias)

    run_ranks(2, rank_main)


def test_diloco_sends_each_fragment_once_a_round_and_ranks_agree_at_its_end_3_ranks() -> None:
    def rank_main(rank: int) -> None:
        layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
        module = nn.Sequential(*layers)
        inner = torch.optim.SGD(module.parameters(), lr=0.01)
        optimizer = dist.DiLoCo(inner, period=4, fragments=2, dtype=torch.bfloat16)
        sent: list[int] = []
        for _ in range(8):
            optimizer.zero_grad()
            module(torch.full((1, 4), rank + 1.0)).sum().backward()
            with CommRecorder() as seen:
                optimizer.step()
            sent.append(seen.nbytes("all_reduce"))
        assert sent == [0, 64, 0, 64, 0, 64, 0, 64]  # two layers of 16 numbers of 2 bytes
        last = layers[0].weight.detach()
        theirs = [torch.empty_like(last) for _ in range(3)]
        dist.all_gather(theirs, last)
        assert torch.equal(theirs[0], theirs[1])
        assert torch.equal(theirs[0], theirs[2])

    run_ranks(3, rank_main)


def test_impossible_rounds_and_foreign_states_are_refused_1_rank() -> None:
    def rank_main(_: int) -> None:
        inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        for period, fragments in [(0, 1), (2, 3), (5, 3)]:
            with pytest.raises(UsageError):
                dist.DiLoCo(inner, period=period, fragments=fragments)
        with pytest.raises(UsageError):
            dist.DiLoCo(inner, period=2).load_state_dict(inner.state_dict())

    run_ranks(1, rank_main)


@pytest.mark.parametrize("kind", [dist.DiLoCo, dist.PostLocalSGDOptimizer])
def test_outer_optimizers_have_hooks_and_refuse_to_be_copied_1_rank(kind: type) -> None:
    def rank_main(rank: int) -> list[str]:
        parameter = nn.Parameter(torch.ones(1))
        local = torch.optim.SGD([parameter], lr=0.1)
        outer = kind(local, 4 if kind is dist.DiLoCo else dist.PeriodicModelAverager(4))
        called: list[str] = []
        outer.register_step_pre_hook(lambda *_: called.append("before"))
        outer.register_step_post_hook(lambda *_: called.append("after"))
        with pytest.raises(UsageError):
            copy.deepcopy(outer)
        parameter.grad = torch.ones(1)
        outer.step()
        return called

    assert run_ranks(1, rank_main) == [["before", "after"]]
