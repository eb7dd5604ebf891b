"""NCCL through the same adapter as Gloo: one rank, one GPU; without a GPU, what surrounds NCCL."""

from __future__ import annotations

import gc
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d as c10d

import dure as dist
from dure.comm.backends import torch_engine
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.registry import open_backend
from dure.errors import UsageError
from dure.store import HashStore

HAS_NCCL = torch.cuda.is_available() and dist.is_nccl_available()


def options_of_one(**more):
    limit = timedelta(seconds=5)
    given = {"store": HashStore(), "rank": 0, "size": 1, "global_ranks": (0,), "name": "g"}
    return BackendOptions(**given, timeout=limit, **more)


@pytest.mark.skipif(HAS_NCCL, reason="needs a machine without NCCL: this one has it")
def test_nccl_without_cuda_is_a_usage_error():
    with pytest.raises(UsageError):
        open_backend("nccl", options_of_one()).complete()


class NotNccl:
    """Does with the store what NCCL does: C++ keeps it, and a clone, and calls them later."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, settings):
        self.store = c10d.PrefixStore("nccl", store)
        self.clone = self.store.clone()
        self.reduced = []

    def allreduce(self, tensors, options=None):
        self.reduced += tensors
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)


@pytest.fixture
def not_nccl(monkeypatch):
    monkeypatch.setattr(torch_engine, "ProcessGroupNCCL", NotNccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_nccl_store_is_usable_as_long_as_the_group(not_nccl):
    options = options_of_one()
    group = torch_engine.create_nccl(options)
    gc.collect()
    store, clone = group._engine._engine.store, group._engine._engine.clone
    store.set("id", "12")
    clone.append("id", "3")
    assert clone.multi_get(["id"]) == [b"123"]
    assert store.compare_set("id", "123", "4") == b"4"
    clone.multi_set(["a", "b"], ["5", "6"])
    assert clone.num_keys() == 3
    assert clone.has_extended_api()
    assert options.store.list_keys() == ["nccl/a", "nccl/b", "nccl/id"]


@pytest.mark.parametrize(("given", "used"), [("meta:1", "meta:1"), (None, "cuda")])
def test_nccl_barrier_is_on_the_device_of_the_group(not_nccl, monkeypatch, given, used):
    seen = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device, **__: seen.append(str(device)))
    device = None if given is None else torch.device(given)
    group = torch_engine.create_nccl(options_of_one(device_id=device))
    group._engine.barrier()
    assert seen == [used]


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
