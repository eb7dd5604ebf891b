"""Training on one GPU: what DDP costs there, scaling and mixed precision, DataParallel."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import dure as dist
from dure.store import HashStore

HAS_NCCL = torch.cuda.is_available() and dist.is_nccl_available()
pytestmark = pytest.mark.skipif(
    not HAS_NCCL, reason="needs a CUDA build of torch with NCCL, and a GPU"
)

TURNS, STEPS_A_TURN = 10, 5


@pytest.fixture
def device() -> Iterator[torch.device]:
    """One rank on the first GPU."""
    first = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=first)
    yield first
    dist.destroy_process_group()


def stepper(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Time some steps on the device itself: by events, so that Python's own time is not in it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS_A_TURN):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS_A_TURN


def test_one_rank_ddp_costs_two_percent_at_most(device: torch.device) -> None:
    bare = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).to(device)
    wrapped = dist.DistributedDataParallel(copy.deepcopy(bare), device_ids=[0])
    x = torch.randn(4096, 4096, device=device)
    steps = [stepper(bare, x), stepper(wrapped, x)]
    for step in steps * 3:
        step()
    times = [[milliseconds(step) for step in steps] for _ in range(TURNS)]
    alone, with_ddp = (statistics.median(column) for column in zip(*times, strict=True))
    assert with_ddp <= 1.02 * alone, f"{with_ddp:.3f} ms against {alone:.3f} ms"


def test_scaler_skips_an_overflow_and_grows_back(device: torch.device) -> None:
    model = dist.DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[0])
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


def test_data_parallel_is_the_whole_batch_on_all_gpus(device: torch.device) -> None:
    whole = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(device).double()
    split = copy.deepcopy(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        parallel = dist.DataParallel(split)
    assert len(parallel.device_ids) == torch.cuda.device_count()
    x = torch.randn(12, 8, dtype=torch.float64)
    for model, batch in ((whole, x.to(device)), (parallel, x)):
        model(batch).square().sum().backward()
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
