"""DDP on n thread-ranks against one process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks

SAMPLES, STEPS = 48, 2  # a batch can be divided among all numbers of ranks below


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
    ).double()


def convolution() -> nn.Module:
    """A weight in channels-last order."""
    conv = nn.Conv2d(1, 4, 3, padding=1)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    layers = (nn.Unflatten(1, (1, 2, 3)), conv, nn.Flatten(), nn.Linear(24, 6))
    return nn.Sequential(*layers).double()


def train(model: Any, rank: int, size: int, accumulate: bool) -> list[torch.Tensor]:
    """Make a few steps on this rank's share of every batch; return the parameters."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, SAMPLES, 6)
    inputs, targets = (torch.randn(shape, generator=generator).double() for _ in "xy")
    mine = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        if accumulate and isinstance(model, dist.DistributedDataParallel):
            with model.no_sync():
                nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        elif accumulate:
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("n", "make", "accumulate"),
    [
        (1, mlp, True),
        (2, lambda: Tied().double(), False),
        (3, mlp, True),
        (3, TwoDtypes, False),
        (4, convolution, False),
        (16, mlp, False),
    ],
)
def test_ranks_make_the_steps_of_one_process(
    n: int, make: Callable[[], nn.Module], accumulate: bool
) -> None:
    torch.manual_seed(1)
    model = make()
    expected = train(copy.deepcopy(model), 0, 1, accumulate)

    def rank_main(rank: int) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        with torch.no_grad():
            for p in own.parameters():
                p.add_(rank)  # wrapping gives all ranks the values of rank 0
        return train(dist.DistributedDataParallel(own, bucket_cap_mb=0.005), rank, n, accumulate)

    results = run_ranks(n, rank_main)
    # Sums over the batch are taken in another order.
    tolerance = 1e-6 if make is TwoDtypes else 1e-12
    for got in results:
        for ours, theirs, first in zip(got, expected, results[0], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_gradients_of_any_dtype_are_averaged_exactly_3_ranks(dtype: torch.dtype) -> None:
    def rank_main(rank: int) -> list[Any]:
        module = nn.Linear(5, 1, bias=False, dtype=dtype)
        out = dist.DistributedDataParallel(module)(torch.full((1, 5), 3 * rank + 3, dtype=dtype))
        (out.real if dtype.is_complex else out).sum().backward()
        return module.weight.grad.flatten().tolist()

    assert run_ranks(3, rank_main) == [[6] * 5] * 3
