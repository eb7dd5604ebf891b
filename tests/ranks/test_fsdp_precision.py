"""Fully sharded training in fewer bits: what is cast, when, and in which dtype gradients add up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.fsdp import MixedPrecisionPolicy, fully_shard, strategy
from dure.testing import run_ranks
from ranks.fsdp_models import whole

LOW = torch.bfloat16


def model_of(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def batch_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.rand(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def low_gradients(model: nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Return what a rank's backward gives on a copy in bfloat16."""
    low = copy.deepcopy(model).to(LOW)
    low(batch_of(rank, step).to(LOW)).square().sum().backward()
    return [p.grad for p in low.parameters()]  # pyright: ignore


def sharded(way: str, model: Any, **options: Any) -> Any:
    with strategy(way):
        fully_shard(model[0], **options)
        return fully_shard(model, **options)


def gradients(
    way: str, policy: MixedPrecisionPolicy, steps: int = 1, sync_all: bool = True
) -> list[list[torch.Tensor]]:
    def body(rank: int) -> Any:
        model = sharded(way, model_of(), mp_policy=policy)
        for step in range(steps):
            model.set_requires_gradient_sync(sync_all or step == steps - 1)
            model(batch_of(rank, step)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        return [whole(p.grad) for p in model.parameters()]

    return run_ranks(2, body)


def test_gradients_of_bfloat16_are_averaged_in_float32(way: str) -> None:
    """To the bit: each rank's are exact in float32."""
    ranks = [low_gradients(model_of(), rank) for rank in range(2)]
    expected = [(a.float() + b.float()) / 2 for a, b in zip(*ranks, strict=True)]
    for got in gradients(way, MixedPrecisionPolicy(LOW, torch.float32)):
        assert all(map(torch.equal, got, expected))


def test_without_reduce_dtype_they_are_averaged_as_they_come(way: str) -> None:
    ranks = [low_gradients(model_of(), rank) for rank in range(2)]
    expected = [((a + b) / 2).float() for a, b in zip(*ranks, strict=True)]
    exact = [(a.float() + b.float()) / 2 for a, b in zip(*ranks, strict=True)]
    for got in gradients(way, MixedPrecisionPolicy(LOW)):
        assert all(torch.equal(g, g.to(LOW).float()) for g in got)
        assert not all(map(torch.equal, got, exact))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("sync_all", [True, False])
def test_gradients_add_up_in_float32(way: str, sync_all: bool) -> None:
    """Over three backwards, reduced each time or at the last."""
    sums: list[list[torch.Tensor]] = []
    for rank in range(2):
        steps = [low_gradients(model_of(), rank, step) for step in range(3)]
        sums.append([a.float() + b.float() + c.float() for a, b, c in zip(*steps, strict=True)])
    expected = [(a + b) / 2 for a, b in zip(*sums, strict=True)]
    for got in gradients(way, MixedPrecisionPolicy(LOW, torch.float32), 3, sync_all):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_fewer_bits_to_reduce_than_to_compute(way: str) -> None:
    def expected_of(rank: int) -> list[torch.Tensor]:
        model = model_of()
        model(batch_of(rank)).square().sum().backward()
        return [p.grad.to(LOW) for p in model.parameters()]  # pyright: ignore

    ranks = [expected_of(rank) for rank in range(2)]
    for got in gradients(way, MixedPrecisionPolicy(None, LOW)):
        for grad, a, b in zip(got, *ranks, strict=True):
            assert torch.equal(grad, grad.to(LOW).float())
            torch.testing.assert_close(grad, (a.float() + b.float()) / 2, rtol=0.01, atol=1e-3)


class Seeing(nn.Module):
    """Notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("table", torch.ones(5))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, rows: torch.Tensor, *, scale: Any) -> torch.Tensor:
        self.seen = {
            "x": x.dtype,
            "rows": rows.dtype,
            "scale": scale[0].dtype,
            "weight": self.linear.weight.dtype,
            "buffer": self.table.dtype,  # pyright: ignore
        }
        return self.linear(x.to(self.linear.weight.dtype))[rows]


@pytest.mark.parametrize("cast", [True, False])
def test_what_is_cast(way: str, cast: bool) -> None:
    """Floating-point inputs, wherever they are; no integers, no buffers."""

    def body(rank: int) -> None:
        model = Seeing()
        policy = MixedPrecisionPolicy(LOW, torch.float32, torch.float64, cast_forward_inputs=cast)
        with strategy(way):
            fully_shard(model, mp_policy=policy)
        out = model(torch.ones(3, 5), torch.tensor([0, 2]), scale=[torch.ones(1)])
        assert out.dtype == torch.float64
        other = LOW if cast else torch.float32
        assert model.seen == {
            "x": other,
            "rows": torch.int64,
            "scale": other,
            "weight": LOW,
            "buffer": torch.float32,
        }

    run_ranks(2, body)


def test_weights_are_cast_anew_after_each_step(way: str) -> None:
    def body(rank: int) -> None:
        model = nn.Linear(4, 4, bias=False)
        with strategy(way):
            fully_shard(model, mp_policy=MixedPrecisionPolicy(LOW, torch.float32))
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model.weight.fill_(value)
                assert model(torch.ones(1, 4)).tolist() == [[4 * value] * 4]
            loss = model(torch.ones(1, 4)).sum()
            with torch.no_grad():
                assert model(torch.ones(1, 4)).tolist() == [[4 * value] * 4]
            loss.backward()

    run_ranks(2, body)


def test_modules_of_different_policies(way: str) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        seen: list[torch.dtype] = []
        for module in model:
            module.register_forward_pre_hook(lambda m, i: seen.append(i[0].dtype))
        low = MixedPrecisionPolicy(LOW, torch.float32)
        with strategy(way):
            fully_shard(model[0], mp_policy=low)
            fully_shard(model[1], mp_policy=MixedPrecisionPolicy(torch.float32))
            fully_shard(model[2], mp_policy=low)
            fully_shard(model)
        out = model(torch.ones(2, 4))
        assert out.dtype == LOW
        out.sum().backward()
        assert seen == [LOW, torch.float32, LOW]

    run_ranks(2, body)


def test_integers_are_no_precision() -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        with pytest.raises(ModuleError, match="floating-point"):
            MixedPrecisionPolicy(**{name: torch.int8})  # pyright: ignore


@pytest.mark.parametrize("where", ["torch", "dure"])
def test_a_scaler_skips_on_all_ranks(way: str, where: str) -> None:
    """Infinite on rank 1 in the second step: both skip it, and halve the scale."""
    from dure.parallel.amp import GradScaler

    reference = model_of().double()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in (0, 2):
        optimizer.zero_grad()
        for rank in range(2):
            (reference(batch_of(rank, step).double()).square().sum() / 2).backward()
        optimizer.step()

    def body(rank: int) -> Any:
        model = sharded(way, model_of().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make: Any = torch.amp.GradScaler if where == "torch" else GradScaler
        scaler = make("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch_of(rank, step).double()).square().sum()
            if rank == 1 and step == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [whole(p) for p in model.parameters()]

    for scale, weights in run_ranks(2, body):
        assert scale == 4.0
        for one, other in zip(weights, reference.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach())
