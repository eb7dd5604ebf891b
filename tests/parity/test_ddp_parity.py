"""DDP on n thread-ranks against one process on the whole batch.

Weights, inputs and weights of the loss are small integers and powers of two, and batches a multiple
of the ranks where that makes every sum exact; where layers divide (batch norm, 3 ranks), the
comparison has the tolerance of float64 sums taken in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks

RANKS = [1, 2, 3, 4, 16]
SAMPLES = 48  # a multiple of all of them
STEPS = 3


class Tied(nn.Module):
    """Decoder and encoder share one weight; a bias is frozen; one parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.encoder.bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x))) + self.nothing.sum()


class TwoDtypes(nn.Module):
    """Layers of different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5).double()
        self.narrow = nn.Linear(5, 6).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).tanh().float()).double()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 6)
    )


def convolution() -> nn.Module:
    """A weight in channels-last order."""
    conv = nn.Conv2d(1, 4, 3, padding=1)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), conv, nn.Flatten(), nn.Linear(24, 6))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(STEPS, SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, y


def train(model: nn.Module, rank: int, size: int, momentum: float = 0.9) -> list[torch.Tensor]:
    """Make a few steps on this rank's share of every batch; return the parameters."""
    share = SAMPLES // size
    mine = slice(rank * share, (rank + 1) * share)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=momentum
    )
    for x, y in zip(*data(), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def wrapped(rank: int, model: nn.Module, **options: object) -> dist.DistributedDataParallel:
    """Wrap a copy of `model`, which on ranks other than 0 starts from other values."""
    own = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for p in own.parameters():
                p.add_(rank)
    return dist.DistributedDataParallel(own, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("make", [mlp, Tied, TwoDtypes, convolution])
def test_ddp_makes_the_steps_of_one_process(n: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = make()
    if make is not TwoDtypes:
        model = model.double()
    expected = train(copy.deepcopy(model), 0, 1)

    def rank_main(rank: int) -> list[torch.Tensor]:
        return train(wrapped(rank, model, bucket_cap_mb=0.005), rank, n)

    results = run_ranks(n, rank_main)
    for got in results:
        for ours, theirs, first in zip(got, expected, results[0], strict=True):
            assert torch.equal(ours, first)
            # Sums over the batch are taken in another order.
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=1e-6 if make is TwoDtypes else 1e-12,
                atol=1e-7 if make is TwoDtypes else 1e-12,
            )


@pytest.mark.parametrize("n", RANKS)
def test_accumulation_under_no_sync_equals_one_large_batch(n: int) -> None:
    torch.manual_seed(1)
    model = mlp().double()
    x, y = data()
    whole = copy.deepcopy(model)
    (nn.functional.mse_loss(whole(x.flatten(0, 1)), y.flatten(0, 1))).backward()

    def rank_main(rank: int) -> list[torch.Tensor | None]:
        ddp = wrapped(rank, model)
        share = SAMPLES // n
        mine = slice(rank * share, (rank + 1) * share)
        for step in range(STEPS):
            loss_of = nn.functional.mse_loss
            if step < STEPS - 1:
                with ddp.no_sync():
                    (loss_of(ddp(x[step, mine]), y[step, mine]) / STEPS).backward()
            else:
                (loss_of(ddp(x[step, mine]), y[step, mine]) / STEPS).backward()
        return [p.grad for p in ddp.parameters()]

    for grads in run_ranks(n, rank_main):
        for got, p in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_integers_are_exact_and_bitwise_equal_4_ranks() -> None:
    weight = torch.arange(12.0).view(3, 4)

    def rank_main(rank: int) -> torch.Tensor:
        ddp = dist.DistributedDataParallel(nn.Linear(4, 3, bias=False))
        with torch.no_grad():
            ddp.module.weight.copy_(weight)
        x = torch.full((1, 4), float(rank + 1))
        ddp(x).sum().backward()
        return ddp.module.weight.grad

    for gradient in run_ranks(4, rank_main):
        assert torch.equal(gradient, torch.full((3, 4), 2.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_gradients_of_other_dtypes_are_averaged_3_ranks(dtype: torch.dtype) -> None:
    def rank_main(rank: int) -> torch.Tensor | None:
        module = nn.ParameterDict({"w": torch.ones(5, dtype=dtype)})
        ddp = dist.DistributedDataParallel(Sum(module))
        out = ddp(3 * (rank + 1))
        (out.real if dtype.is_complex else out).backward()
        return module["w"].grad

    for gradient in run_ranks(3, rank_main):
        assert gradient is not None
        assert gradient.tolist() == [6] * 5


class Sum(nn.Module):
    """The sum of all parameters, times a factor."""

    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.inner = parameters

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.inner.parameters()]).sum() * factor
