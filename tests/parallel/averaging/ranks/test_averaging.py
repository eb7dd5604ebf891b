"""Averaged models and DiLoCo: when, over which ranks, and in how many reductions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.parallel.averaging import packing
from dure.parallel.averaging.averagers import PeriodicModelAverager
from dure.parallel.averaging.diloco import DiLoCo
from dure.parallel.averaging.post_local import PostLocalSGDOptimizer
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

NONE = [0.0, 1.0, 2.0, 3.0]  # the ranks' values, of which their mean is 1.5
PAIRS = [0.5, 0.5, 2.5, 2.5]
ALL = [1.5] * 4


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: dist.PeriodicModelAverager(period=3, warmup_steps=2),
            [NONE, NONE, ALL, NONE, NONE, ALL, NONE, NONE, ALL],
        ),
        (lambda: dist.HierarchicalModelAverager({2: 2, 4: 4}), [ALL, NONE, PAIRS, NONE, ALL]),
    ],
)
def test_averagers_act_when_they_are_due_4_ranks(
    make: Callable[[], Any], expected: list[list[float]]
) -> None:
    def rank_main(rank: int) -> list[float]:
        averager = make()
        seen: list[float] = []
        for _ in expected:
            parameter = nn.Parameter(torch.tensor(float(rank)))
            parameter.grad = torch.zeros(())
            averager.average_parameters([parameter])
            seen.append(parameter.item())
        return seen

    assert run_ranks(4, rank_main) == [list(values) for values in zip(*expected, strict=True)]


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

    def rank_main(rank: int) -> list[tuple[str, int]]:
        shapes = [(2, 3), (5,), (), (4, 4), (0,)]
        tensors = [torch.full(shape, 3.0 * rank) for shape in shapes]
        tensors += [torch.full((3,), rank, dtype=torch.float64)]
        world = dist.group.WORLD
        assert world is not None
        with CommRecorder() as seen:
            packing.average_(tensors, world)
        assert all(bool((t == (1 if t.dtype == torch.float64 else 3)).all()) for t in tensors)
        return [(e.op, e.nbytes) for e in seen.events]

    # float32: 6 + 5 + 1 numbers fill a piece of 64 bytes, 16 another; and one of float64
    sizes = (12 * 4, 16 * 4, 3 * 8)
    assert run_ranks(3, rank_main) == [[("all_reduce", size) for size in sizes]] * 3


KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "post-local SGD": lambda optim: PostLocalSGDOptimizer(optim, PeriodicModelAverager(2)),
    "DiLoCo": lambda optim: DiLoCo(optim, period=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_steps_and_states_run_once_2_ranks(kind: str) -> None:
    def rank_main(rank: int) -> list[str]:
        model, seen = nn.Linear(1, 1), []
        optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {"packed": state})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: state["packed"])
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert list(state) == ["packed"] and "param_groups" in state["packed"]
        optimizer.load_state_dict(state)
        return seen

    expected = ["before step", "after step", "before saving", "after loading"]
    assert run_ranks(2, rank_main) == [expected] * 2


Optimizer = torch.optim.Optimizer


def layer() -> nn.Linear:
    """Return the same layer on all ranks."""
    module = nn.Linear(2, 2, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    return module


def train(module: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> list[torch.Tensor]:
    """Train on other data on each rank; return the parameters."""
    for step in steps:
        optimizer.zero_grad()
        x = torch.tensor([[rank + 1.0, step]], dtype=torch.float64)
        module(x.sin()).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_resumes_from_its_state_in_the_middle_of_a_round_2_ranks(fragments: int) -> None:
    def make(module: nn.Module) -> dist.DiLoCo:
        inner = torch.optim.AdamW(module.parameters(), lr=0.1)
        return dist.DiLoCo(inner, period=4, fragments=fragments)

    def rank_main(rank: int) -> None:
        module, again = layer(), layer()
        optimizer, other = make(module), make(again)
        train(module, optimizer, rank, range(6))
        again.load_state_dict(copy.deepcopy(module.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps = range(6, 13)
        found, expected = train(again, other, rank, steps), train(module, optimizer, rank, steps)
        assert all(map(torch.equal, found, expected))

    run_ranks(2, rank_main)


def test_diloco_sends_each_fragment_once_a_round_and_ranks_agree_at_its_end_3_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[int], list[float]]:
        module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        inner = torch.optim.SGD(module.parameters(), lr=0.01)
        optimizer = dist.DiLoCo(inner, period=4, fragments=2, dtype=torch.bfloat16)
        sent: list[int] = []
        for _ in range(8):
            optimizer.zero_grad()
            module(torch.full((1, 4), rank + 1.0)).sum().backward()
            with CommRecorder() as seen:
                optimizer.step()
            sent.append(seen.nbytes("all_reduce"))
        return sent, module[0].weight.flatten().tolist()

    results = run_ranks(3, rank_main)
    # Two layers of 16 numbers of 2 bytes, in every second step.
    assert results == [([0, 64, 0, 64, 0, 64, 0, 64], results[0][1])] * 3


@on_ranks(1)
def test_impossible_rounds_and_foreign_states_are_refused_1_rank(rank: int) -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for period, fragments in [(0, 1), (2, 3), (5, 3)]:
        with pytest.raises(UsageError):
            dist.DiLoCo(inner, period=period, fragments=fragments)
    with pytest.raises(UsageError):
        dist.DiLoCo(inner, period=2).load_state_dict(inner.state_dict())
