"""Training on one GPU: scaling and mixed precision, DataParallel."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.store import HashStore

pytestmark = pytest.mark.needs("GPU")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """One rank on the first GPU."""
    first = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=first)
    yield first
    dist.destroy_process_group()


def test_scaler_skips_an_overflow_and_grows_back(device: torch.device) -> None:
    model: Any = dist.DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = dist.GradScaler(init_scale=2.0**8, growth_interval=2)
    assert scaler.is_enabled()
    scales: list[float] = []
    for step in range(4):
        before = model.module.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(4, 8, device=device)).float().square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.module.weight) == (step == 1)
        scales.append(scaler.get_scale())
    assert scales == [256.0, 128.0, 128.0, 256.0]


def test_mixed_precision_is_that_of_a_low_precision_module(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    low = copy.deepcopy(model).to(torch.bfloat16)
    precision = dist.MixedPrecision(param_dtype=torch.bfloat16)
    ddp = dist.DistributedDataParallel(model, device_ids=[0], mixed_precision=precision)
    x = torch.randn(16, 64, device=device)
    ddp(x).float().square().sum().backward()
    low(x.to(torch.bfloat16)).float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), low.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad.float())
