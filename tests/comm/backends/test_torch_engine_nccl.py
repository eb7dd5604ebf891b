"""NCCL through the same adapter as Gloo: one rank, one GPU."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.registry import open_backend
from dure.errors import UsageError
from dure.store import HashStore

HAS_NCCL = torch.cuda.is_available() and dist.is_nccl_available()


@pytest.mark.skipif(HAS_NCCL, reason="needs a machine without NCCL: this one has it")
def test_nccl_without_cuda_is_a_usage_error():
    options = BackendOptions(
        store=HashStore(),
        rank=0,
        size=1,
        global_ranks=(0,),
        timeout=timedelta(seconds=5),
        name="g",
    )
    with pytest.raises(UsageError):
        open_backend("nccl", options).complete()


@pytest.mark.needs("GPU")
def test_nccl_one_rank_runs_every_collective():
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            t = torch.ones(5, device=device).to(dtype)
            dist.all_reduce(t)
            out = torch.empty_like(t)
            dist.reduce_scatter_single(out, t)
            dist.all_gather([out], t)
            dist.all_to_all_single(out, t)
            dist.broadcast(out, src=0)
            assert torch.equal(out.cpu(), torch.ones(5).to(dtype))
        dist.all_reduce(torch.ones(3, device=device, dtype=torch.int32), dist.ReduceOp.BXOR)
        dist.barrier()
    finally:
        dist.destroy_process_group()
