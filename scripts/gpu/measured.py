"""Time and memory with one rank, beside `torch.distributed`."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as stock
from torch import nn

import dure as dist
from gpu.checks import BACKEND, DEVICE, check, one_rank


def layers_of(width: int, count: int) -> nn.Sequential:
    """Return `count` layers with a bias, of a width."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(DEVICE)


def step_time(model: nn.Module, width: int, rows: int) -> tuple[float, float]:
    """Return the median time of a step in ms, and the peak of memory in MiB."""
    on_gpu = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, width, device=DEVICE)
    times: list[float] = []
    for number in range(13 if on_gpu else 5):
        if number == 3 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    return statistics.median(times[3:]), peak


SIZES = {"16 layers of 2048": (2048, 16, 4096), "100 layers of 64": (64, 100, 64)}


def measured(wrap: str, library: str, size: str) -> None:
    """Add the measurement of one library's DDP or `fully_shard`, or of the model alone."""

    @check("train", f"{wrap} of {library}, {size}", alone=True)
    def run() -> str:
        width, count, rows = SIZES[size]
        if DEVICE.type == "cpu":
            width, rows = min(width, 64), 16
        model = layers_of(width, count)
        with nullcontext() if library == "torch" else one_rank():
            if library == "torch":
                options = {"device_id": DEVICE} if DEVICE.type == "cuda" else {}
                stock.init_process_group(
                    BACKEND, store=stock.HashStore(), rank=0, world_size=1, **options
                )
            if wrap == "ddp":
                make: Any = dist.DistributedDataParallel
                if library == "torch":
                    from torch.nn.parallel import DistributedDataParallel as make
                model = make(model)
            elif wrap == "fully_shard":
                from dure.fsdp import fully_shard as shard

                if library == "torch":
                    from torch.distributed.fsdp import fully_shard as shard
                for layer in model:
                    shard(layer)
                shard(model)
            taken_ms, peak = step_time(model, width, rows)
            return f"{taken_ms:.2f} ms per step, {peak:.0f} MiB"


for _size in SIZES:
    measured("one process", "torch", _size)
    for _wrap in ("ddp", "fully_shard"):
        for _library in ("torch", "dure"):
            measured(_wrap, _library, _size)


def reduced(library: str, dtype: torch.dtype) -> None:
    """Add the measurement of one all_reduce of 64 MiB."""

    @check("nccl", f"all_reduce of 64 MiB {dtype}, {library}", cuda=True, alone=True)
    def run() -> str:
        if library == "torch":
            stock.init_process_group(
                "nccl", store=stock.HashStore(), rank=0, world_size=1, device_id=DEVICE
            )
        with nullcontext() if library == "torch" else one_rank():
            module: Any = stock if library == "torch" else dist
            t = torch.zeros((64 << 20) // dtype.itemsize, dtype=dtype, device=DEVICE)
            times: list[float] = []
            for _ in range(20):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                module.all_reduce(t, module.ReduceOp.SUM)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) * 1e6)
            extra = torch.cuda.max_memory_allocated() / 2**20 - 64
            return f"{statistics.median(times):.0f} us, {extra:.0f} MiB more at the peak"


for _dtype in (torch.float32, torch.bfloat16):
    for _library in ("torch", "dure"):
        reduced(_library, _dtype)
