"""Gradient scaling between ranks: one decision, one scale, one message."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import Desync, UsageError
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

INF = float("inf")
SGD = torch.optim.SGD


def local_step(
    scaler: torch.amp.GradScaler, gradient: float, optimizer: Any = SGD, **options: Any
) -> tuple[bool, float]:
    """Step one parameter that this rank alone has; return whether it moved, and the scale."""
    weight = nn.Parameter(torch.zeros(2))
    stepped = optimizer([weight], lr=1.0, **options)
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([gradient, 1.0])
    scaler.step(stepped)
    scaler.update()
    return bool(weight.detach().any()), scaler.get_scale()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "optimizer", [{}, {"optimizer": torch.optim.Adam, "fused": True}], ids=["SGD", "fused"]
)
def test_overflow_on_one_rank_skips_the_step_on_all(n: int, optimizer: dict[str, Any]) -> None:
    def rank_main(rank: int) -> list[tuple[bool, float]]:
        scaler = dist.GradScaler("cpu", init_scale=4.0)
        bad = INF if rank == n - 1 else 1.0
        return [local_step(scaler, bad, **optimizer), local_step(scaler, 1.0, **optimizer)]

    assert run_ranks(n, rank_main) == [[(False, 2.0), (True, 2.0)]] * n


def drive(scaler: torch.amp.GradScaler) -> list[Any]:
    """Some steps with two optimizers and infs here and there; the state after each."""
    generator = torch.Generator().manual_seed(7)
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    trace: list[Any] = []
    for number in range(8):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(3, 2, generator=generator)
            if number in (3, 6) and model is models[number % 2]:
                x[0, 0] = INF
            scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizers[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        trace.append([scaler.state_dict(), *(m.weight.tolist() for m in models)])
    return trace


SETTINGS = ("cpu", 8.0, 3.0, 0.25, 2)


def test_scale_and_weights_are_torchs_bit_by_bit_2_ranks() -> None:
    expected = drive(torch.amp.GradScaler(*SETTINGS))
    assert len({state[0]["scale"] for state in expected}) > 3
    assert run_ranks(2, lambda _: drive(dist.GradScaler(*SETTINGS))) == [expected] * 2


def test_scaler_works_without_a_group_and_can_be_copied_and_pickled() -> None:
    scaler = dist.GradScaler(*SETTINGS)
    assert drive(scaler) == drive(torch.amp.GradScaler(*SETTINGS))
    other = dist.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    for again in (other, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert again.state_dict() == scaler.state_dict()


@on_ranks(2)
def test_disabled_scaler_sends_nothing_2_ranks(rank: int) -> None:
    scaler = dist.GradScaler("cpu", enabled=False)
    with CommRecorder() as seen:
        moved, scale = local_step(scaler, 1.0)
    assert [moved, scale, seen.ops, scaler.state_dict()] == [True, 1.0, [], {}]


@pytest.mark.parametrize("what", ["scale", "growth_interval", "_growth_tracker"])
def test_scalers_in_different_states_are_refused_on_all_ranks_3_ranks(what: str) -> None:
    def rank_main(rank: int) -> Desync:
        scaler = dist.GradScaler("cpu")
        if rank == 2:
            scaler.load_state_dict(scaler.state_dict() | {what: 1})
        with pytest.raises(Desync) as caught:
            local_step(scaler, 1.0)
        return caught.value

    for error in run_ranks(3, rank_main):
        assert set(error.calls) == {0, 1, 2}
        assert error.calls[0] == error.calls[1] != error.calls[2]


def test_group_of_a_scaler_may_be_a_part_of_the_world_4_ranks() -> None:
    def rank_main(rank: int) -> tuple[bool, float]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        scaler = dist.GradScaler("cpu", 4.0, process_group=groups[rank // 2])
        with pytest.raises(UsageError):
            pickle.dumps(scaler)
        return local_step(scaler, INF if rank == 3 else 1.0)

    assert run_ranks(4, rank_main) == [(True, 4.0)] * 2 + [(False, 2.0)] * 2


@on_ranks(2)
def test_optimizer_that_steps_inside_backward_is_refused_2_ranks(rank: int) -> None:
    model = nn.Linear(1, 1)
    optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    scaler = dist.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    with pytest.raises(UsageError):
        scaler.step(optimizer)
