"""DiLoCo: its rounds, its fragments and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

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
