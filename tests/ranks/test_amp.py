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


def local_step(scaler: torch.amp.GradScaler, gradient: list[float] | None) -> tuple[bool, float]:
    """Step one parameter of this rank's own; tell whether it moved, and the scale afterwards."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = weight.sum()
    scaler.scale(loss)
    if gradient is not None:
        weight.grad = torch.tensor(gradient)
    scaler.step(optimizer)
    scaler.update()
    return bool(weight.detach().any()), scaler.get_scale()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_overflow_on_one_rank_skips_the_step_on_all(n: int) -> None:
    def rank_main(rank: int) -> list[tuple[bool, float]]:
        scaler = dist.GradScaler("cpu", init_scale=4.0)
        bad = [float("inf"), 1.0] if rank == n - 1 else [1.0, 1.0]
        return [local_step(scaler, bad), local_step(scaler, [1.0, 1.0])]

    assert run_ranks(n, rank_main) == [[(False, 2.0), (True, 2.0)]] * n


def test_torchs_scaler_lets_the_ranks_drift_apart_2_ranks() -> None:
    # Why there is one of our own; should torch's ever agree, this says so.
    def rank_main(rank: int) -> tuple[bool, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        return local_step(scaler, [float("nan") if rank else 1.0, 1.0])

    assert run_ranks(2, rank_main) == [(True, 4.0), (False, 2.0)]


def test_rank_without_gradients_takes_part_3_ranks() -> None:
    def rank_main(rank: int) -> list[tuple[bool, float]]:
        scaler = dist.GradScaler("cpu", init_scale=4.0)
        good = local_step(scaler, None if rank == 1 else [1.0, 1.0])
        bad = local_step(scaler, None if rank == 1 else [float("inf"), 1.0])
        return [good, bad]

    for rank, seen in enumerate(run_ranks(3, rank_main)):
        assert seen == [(rank != 1, 4.0), (False, 2.0)]


def test_agreement_is_one_small_all_reduce_an_optimizer_and_step_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        scaler = dist.GradScaler("cpu")
        models = [nn.Linear(3, 3) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        with CommRecorder() as seen:
            for model in models:
                scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.5)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return [seen.ops, seen.nbytes()]

    assert run_ranks(2, rank_main) == [[["all_reduce"] * 2, 2 * 96]] * 2


def test_fused_optimizer_skips_on_all_ranks_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        scaler = dist.GradScaler("cpu", init_scale=4.0)
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([weight], lr=1.0, fused=True)
        moved: list[bool] = []
        for bad_rank in (1, None):
            scaler.scale(weight.sum())
            weight.grad = torch.full([2], float("inf") if rank == bad_rank else 1.0)
            scaler.step(optimizer)
            scaler.update()
            moved.append(bool(weight.detach().any()))
        return [moved, scaler.get_scale()]

    assert run_ranks(2, rank_main) == [[[False, True], 2.0]] * 2


def test_unscaled_gradients_can_be_clipped_before_the_step_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        scaler = dist.GradScaler("cpu", init_scale=1024.0)
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        scaler.unscale_(optimizer)
        assert nn.utils.clip_grad_norm_([weight], 1.0) == 5.0
        scaler.step(optimizer)
        scaler.update()
        return weight.tolist()

    for values in run_ranks(2, rank_main):
        assert values == pytest.approx([-0.6, -0.8], rel=1e-5)


def drive(scaler: torch.amp.GradScaler) -> list[Any]:
    """Thirty steps with two optimizers and infs here and there; the state after each."""
    generator = torch.Generator().manual_seed(7)
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    trace: list[Any] = []
    for _ in range(30):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(3, 2, generator=generator)
            if torch.rand((), generator=generator) < 0.15:
                x[0, 0] = float("inf")
            scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizers[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        trace.append([scaler.state_dict(), *(m.weight.tolist() for m in models)])
    return trace


@pytest.mark.parametrize("n", [1, 2])
def test_scale_and_weights_are_torchs_bit_by_bit(n: int) -> None:
    def rank_main(rank: int) -> list[Any]:
        return drive(dist.GradScaler("cpu", 8.0, 3.0, 0.25, 2))

    expected = drive(torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 2))
    assert len({str(state[0]["scale"]) for state in expected}) > 3
    assert run_ranks(n, rank_main) == [expected] * n


def test_scaler_works_without_a_group_and_comes_back_from_pickle() -> None:
    scaler = dist.GradScaler("cpu", 8.0, 3.0, 0.25, 2)
    assert drive(scaler) == drive(torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 2))
    again: dist.GradScaler = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict() == copy.deepcopy(scaler).state_dict()
    other = dist.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert isinstance(other, torch.amp.GradScaler)


def test_disabled_scaler_sends_nothing_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        scaler = dist.GradScaler("cpu", enabled=False)
        with CommRecorder() as seen:
            moved, scale = local_step(scaler, [1.0, 1.0])
        return [moved, scale, seen.ops, scaler.state_dict()]

    assert run_ranks(2, rank_main) == [[True, 1.0, [], {}]] * 2


@pytest.mark.parametrize("what", ["scale", "growth_interval", "_growth_tracker"])
def test_scalers_in_different_states_are_refused_on_all_ranks_3_ranks(what: str) -> None:
    def rank_main(rank: int) -> Desync:
        scaler = dist.GradScaler("cpu")
        if rank == 2:
            scaler.load_state_dict(scaler.state_dict() | {what: 1})
        with pytest.raises(Desync) as caught:
            local_step(scaler, [1.0, 1.0])
        return caught.value

    for error in run_ranks(3, rank_main):
        assert set(error.calls) == {0, 1, 2}
        assert error.calls[0] == error.calls[1] != error.calls[2]


def test_group_of_a_scaler_may_be_a_part_of_the_world_4_ranks() -> None:
    def rank_main(rank: int) -> tuple[bool, float]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        scaler = dist.GradScaler("cpu", 4.0, process_group=mine)
        with pytest.raises(UsageError):
            pickle.dumps(scaler)
        return local_step(scaler, [float("inf") if rank == 3 else 1.0, 1.0])

    assert run_ranks(4, rank_main) == [(True, 4.0)] * 2 + [(False, 2.0)] * 2


def test_sharded_optimizer_steps_and_skips_as_the_unsharded_one_3_ranks() -> None:
    template = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def train(rank: int, sharded: bool) -> list[torch.Tensor]:
        ddp = dist.DistributedDataParallel(copy.deepcopy(template))
        optimizer = (
            dist.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
            if sharded
            else torch.optim.AdamW(ddp.parameters(), lr=0.05)
        )
        scaler = dist.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        generator = torch.Generator().manual_seed(rank)
        for step in range(5):
            x = torch.randn(3, 4, generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = ddp(x).square().mean()
            scaler.scale(loss).backward()
            if step == 2 and rank == 1:  # after the average: this rank alone has it
                next(ddp.parameters()).grad[0, 0] = float("inf")  # pyright: ignore
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in ddp.parameters()] + [torch.tensor(scaler.get_scale())]

    def rank_main(rank: int) -> list[Any]:
        return [train(rank, True), train(rank, False)]

    results = run_ranks(3, rank_main)
    expected = results[0][1]
    assert float(expected[-1]) == 2.0**13
    for sharded, unsharded in results:
        for a, b, c in zip(sharded, unsharded, expected, strict=True):
            assert torch.equal(a, b) and torch.equal(b, c)


def test_optimizer_that_steps_inside_backward_is_refused_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = dist.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        scaler = dist.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        with pytest.raises(UsageError):
            scaler.step(optimizer)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_of_parts_is_the_norm_of_the_whole_3_ranks(norm_type: float) -> None:
    whole = nn.Parameter(torch.zeros(6))
    whole.grad = torch.tensor([3.0, -4.0, 0.0, 12.0, 1.0, -2.0])

    def rank_main(rank: int) -> list[Any]:
        part = nn.Parameter(torch.zeros(3))
        owned = [] if rank == 2 else [part]
        part.grad = torch.tensor([[3.0, -4.0, 0.0], [12.0, 1.0, -2.0], [9.0, 9.0, 9.0]][rank])
        with CommRecorder() as seen:
            norm = dist.clip_grad_norm_(owned, 2.0, norm_type)
        return [float(norm), part.grad.tolist(), seen.ops]

    norm = nn.utils.clip_grad_norm_([whole], 2.0, norm_type)
    results = run_ranks(3, rank_main)
    assert [r[0] for r in results] == pytest.approx([float(norm)] * 3)
    assert results[0][1] + results[1][1] == pytest.approx(whole.grad.tolist())
    assert [r[2] for r in results] == [["all_reduce"]] * 3


def test_norm_that_is_not_finite_can_be_refused_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        part = nn.Parameter(torch.zeros(1))
        part.grad = torch.full([1], float("inf") if rank else 1.0)
        with pytest.raises(UsageError):
            dist.clip_grad_norm_(part, 1.0, error_if_nonfinite=True)
        with pytest.raises(UsageError):
            dist.clip_grad_norm_(part, 1.0, norm_type=0.0)

    run_ranks(2, rank_main)
