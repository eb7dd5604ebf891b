"""Fully sharded training in fewer bits: casts, and the dtype in which gradients add up."""

# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.fsdp import MixedPrecisionPolicy, fully_shard, strategy
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import by_parts, making, whole
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S

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


def alone(dtype: torch.dtype, rank: int, step: int) -> list[torch.Tensor]:
    """Return what a rank's backward gives on a copy in this dtype."""
    model = model_of().to(dtype)
    model(batch_of(rank, step).to(dtype)).square().sum().backward()
    return [p.grad.float() for p in model.parameters()]  # pyright: ignore


def sharded(way: str, model: Any, **options: Any) -> Any:
    return by_parts(way, model, model[0], **options)


@pytest.mark.parametrize(
    ("compute", "reduce", "steps", "sync_all"),
    [
        (LOW, torch.float32, 1, True),
        (LOW, torch.float32, 3, True),
        (LOW, torch.float32, 3, False),
        (LOW, None, 1, True),
        (None, LOW, 1, True),
    ],
)
def test_gradients_are_averaged_in_the_dtype_of_the_policy(way, compute, reduce, steps, sync_all):
    """Over one backward or three, reduced each time or at the last."""

    def body(rank: int) -> Any:
        model = sharded(way, model_of(), mp_policy=MixedPrecisionPolicy(compute, reduce))
        for step in range(steps):
            model.set_requires_gradient_sync(sync_all or step == steps - 1)
            model(batch_of(rank, step)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        return [whole(p.grad) for p in model.parameters()]

    each = [alone(compute or torch.float32, r, step) for step in range(steps) for r in range(2)]
    expected = [torch.stack(gradients).sum(0) / 2 for gradients in zip(*each, strict=True)]
    for found in run_ranks(2, body):
        exact = all(map(torch.equal, found, expected))
        if reduce is torch.float32:
            assert exact or steps > 1
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        else:
            assert not exact
            assert all(torch.equal(g, g.to(LOW).float()) for g in found)
            torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)


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
@on_ranks(2)
def test_floating_point_inputs_are_cast(rank, way, cast):
    """Floating-point inputs, wherever they are; no integers, no buffers."""

    model = Seeing()
    policy = MixedPrecisionPolicy(LOW, torch.float32, torch.float64, cast_forward_inputs=cast)
    by_parts(way, model, mp_policy=policy)
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


@on_ranks(2)
def test_weights_are_cast_again_after_each_step(rank, way):
    model = nn.Linear(4, 4, bias=False)
    by_parts(way, model, mp_policy=MixedPrecisionPolicy(LOW, torch.float32))
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
            assert model(torch.ones(1, 4)).tolist() == [[4 * value] * 4]
        loss = model(torch.ones(1, 4)).sum()
        with torch.no_grad():
            assert model(torch.ones(1, 4)).tolist() == [[4 * value] * 4]
        loss.backward()


@pytest.mark.parametrize("low", [None, LOW])
def test_unshard_between_steps_shows_what_all_ranks_have_written(way, low):
    arrived = [threading.Event() for _ in range(2)]

    def body(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        with strategy(way):
            for module in model:
                fully_shard(module, mp_policy=MixedPrecisionPolicy(low))
            fully_shard(model)
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if rank == 0:
                arrived[step].set()
            else:  # writes while the other one reads, if that does not wait
                assert arrived[step].wait(PATIENCE_S)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            for module in model:
                module.unshard()
                assert module.weight.tolist() == [[step, step], [step, step]]
            for module in model:
                module.reshard()

    run_ranks(2, body)


def test_integer_dtypes_are_refused():
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        with pytest.raises(ModuleError, match="floating-point"):
            MixedPrecisionPolicy(**{name: torch.int8})  # pyright: ignore


@pytest.mark.parametrize("where", ["torch", "dure"])
def test_a_scaler_skips_on_all_ranks(way, where):
    """Infinite on rank 1 in the second step: both skip it, and halve the scale."""

    def body(rank: int) -> Any:
        model = sharded(way, model_of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make: Any = torch.amp.GradScaler if where == "torch" else dist.GradScaler
        scaler = make("cpu", init_scale=8.0)
        scales, seen = [], [whole(model[0].weight).clone()]
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch_of(rank, step)).square().sum()
            scaler.scale(loss * torch.inf if rank == step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            seen.append(whole(model[0].weight).clone())
        return scales, [torch.equal(a, b) for a, b in itertools.pairwise(seen)]

    assert run_ranks(2, body) == [([8.0, 4.0, 4.0], [False, True, False])] * 2


# --------------------------------------------------------------------------------------------------
# Containers: dicts that refuse `update` are cast; what a block writes reaches its caller.


@dataclass
class Cache:
    keys: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Caching(nn.Module):
    """y = w * x, which is appended to a cache and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor, cache: Cache, losses: list[torch.Tensor]) -> torch.Tensor:
        y = self.w * x
        cache.keys.append(y.detach())
        cache.calls += 1
        losses.append(y.sum())
        return y


@on_ranks(2)
def test_what_a_block_writes_into_a_container_reaches_its_caller(rank, way):
    with making:
        net = Caching()
    model: Any = by_parts(way, net)
    cache, losses = Cache(), []
    model(torch.tensor([3.0, 5.0], requires_grad=True), cache, losses)
    assert [key.tolist() for key in cache.keys] == [[3.0, 10.0]]
    assert cache.calls == 1
    losses[0].backward()
    assert whole(net.w.grad).tolist() == [3.0, 5.0]
