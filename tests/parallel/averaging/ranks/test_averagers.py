"""Averaged models: when, and over which ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.testing import run_ranks

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
def test_averagers_act_when_they_are_due_4_ranks(make, expected):
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
def test_impossible_schedules_are_refused_2_ranks(make):
    def rank_main(_: int) -> None:
        with pytest.raises(UsageError):
            make()

    run_ranks(2, rank_main)
