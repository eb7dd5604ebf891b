"""What ranks do in the tests of the sharded optimizer with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dure as dist
from tests.parallel.optim.zero_models import KINDS, Net, batch, equal, same, step

Zero = dist.ZeroRedundancyOptimizer


def place_of(tensor: torch.Tensor) -> str:
    """Return "inode:offset" of a tensor in a symmetric heap; empty for ordinary memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            if "memfd:dure-heap" not in line:
                return ""
            offset = tensor.data_ptr() - int(begin, 16) + int(line.split()[2], 16)
            return f"{line.split()[4]}:{offset}"
    raise ValueError("no mapping holds the tensor")


def file_of(tensor: torch.Tensor) -> str:
    """Return the inode of the heap that a tensor is stored in; empty for ordinary memory."""
    return place_of(tensor).partition(":")[0]


def shared_sgd(model: nn.Module) -> Zero:
    return Zero(model.parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True)


def one_memory(rank: int, n: int) -> set[float]:
    """Share a model's parameters, write into those of this rank's shard; return what is seen."""
    model = Net(seed=rank)  # other values on each rank
    expected = Net(seed=0)
    zero = shared_sgd(model)
    assert equal(model, expected)
    assert model.tied.weight is model.mid.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    dist.barrier()
    for parameter in zero.optim.param_groups[0]["params"]:
        parameter.detach().fill_(rank + 1.0)
    dist.barrier()
    seen = {float(p.detach().flatten()[0]) for p in model.parameters()}
    dist.barrier()
    return seen


def training(rank: int, n: int, kind: str, ddp_first: bool = True) -> dict[str, Any]:
    """Train under DDP with a sharded optimizer and with a plain one; compare losses and state.

    Returns:
        The ranks of this host, where the parameters are, and whose state this rank has.
    """
    reference, model = Net(), Net(seed=rank)
    wrapped = dist.DistributedDataParallel(reference)
    plain = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    ddp = dist.DistributedDataParallel(model) if ddp_first else model
    zero = Zero(ddp.parameters(), torch.optim.AdamW, lr=0.01, **KINDS[kind])
    ddp = ddp if ddp_first else dist.DistributedDataParallel(model)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = batch(data)
        assert step(ddp, zero, x) == step(wrapped, plain, x)
    dist.barrier()
    assert equal(model, reference)
    zero.consolidate_state_dict(to=n - 1)
    if rank == n - 1:
        assert same(zero.state_dict()["state"], plain.state_dict()["state"])
    dist.barrier()
    return {
        "host": next(host for host in dist.group.WORLD.hosts if rank in host),
        "files": {file_of(p) for p in model.parameters()},
        "numbers": list(zero.local_state_dict()["state"]),
    }
