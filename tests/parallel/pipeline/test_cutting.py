"""Stages by cost: compared with every way to cut; names, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dure.errors import UsageError
from dure.parallel.pipeline.cutting import cut_by_cost, cut_into_stages, measured_costs


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_other_cut_is_better(costs, data):
    n_stages = data.draw(st.integers(1, len(costs)))
    parts = cut_by_cost(costs, n_stages)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert len(parts) == n_stages and all(len(part) for part in parts)

    def value(ends: list[int]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(sums), sum(x * x for x in sums)

    every = itertools.combinations(range(1, len(costs)), n_stages - 1)
    best = min(value([0, *cuts, len(costs)]) for cuts in every)
    assert value([0, *(part.stop for part in parts)]) == best


def test_stages_keep_the_names_of_layers_and_print():
    layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    cut = cut_into_stages(layers, 2)
    assert [list(stage.state_dict()) for stage in cut.stages] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    x = torch.randn(3, 2)
    assert torch.equal(cut.stages[1](cut.stages[0](x)), layers(x))
    lines = str(cut).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:2] == ["0", "0"] and "24" in lines[1]
    named = cut_into_stages({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)}, 2, costs=[1, 2])
    assert list(named.stages[0].state_dict()) == ["embed.weight"]


class Taking(nn.Linear):
    """A layer whose forward and backward take a given time, by a clock of their own."""

    now = 0.0

    def __init__(self, *seconds: float) -> None:
        super().__init__(3, 3)
        self.seconds = iter(seconds)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = super().forward(input)
        half = next(self.seconds) / 2
        Taking.now += half
        y.register_hook(lambda _: setattr(Taking, "now", Taking.now + half))
        return y


def test_measured_costs_are_the_least_of_three_forwards_and_backwards(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Taking.now)
    layers = [nn.Embedding(10, 3), Taking(9, 5, 7), Taking(2, 2, 2), nn.Tanh()]
    ids = torch.randint(10, (64, 8))
    assert measured_costs(layers, ids) == pytest.approx([0, 5, 2, 0])
    assert all(p.grad is None for layer in layers for p in layer.parameters())


@pytest.mark.parametrize(
    ("costs", "n_stages", "seen"),
    [
        ([1.0], 2, "1 layers, 2 stages"),
        ([1.0, -1.0], 1, "-1.0 of layer 1"),
        ([1.0], 0, "1 layers, 0 stages"),
    ],
)
def test_impossible_cuts_are_refused(costs, n_stages, seen):
    with pytest.raises(UsageError) as caught:
        cut_by_cost(costs, n_stages)
    assert caught.value.seen == seen


def test_costs_are_given_or_measured():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(UsageError, match="both"):
        cut_into_stages(layers, 2, sample=torch.ones(1, 2), costs=[1, 1])
    with pytest.raises(UsageError, match="3 costs, 2 layers"):
        cut_into_stages(layers, 2, costs=[1, 1, 1])
