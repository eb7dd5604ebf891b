"""What ranks do in the tests of the sharded optimizer with real processes."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dure as dist
from ranks.zero_models import Net, batch, equal, step


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
    """Return the inode of the heap that a tensor lies in; empty for ordinary memory."""
    return place_of(tensor).partition(":")[0]


def private_kib() -> int:
    """Return how much memory this process has for itself."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def look_at_all_pages(model: nn.Module) -> None:
    """Read a number of each page of the parameters."""
    assert all(bool(p.detach().view(-1)[::1024].isfinite().all()) for p in model.parameters())


def one_memory(rank: int, n: int) -> dict[str, Any]:
    """Share a model's parameters; say where they are, and what was written into them is seen."""
    model = Net(seed=rank)  # other values on each rank
    expected = Net(seed=0)
    zero = dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True
    )
    assert equal(model, expected)
    assert model.tied.weight is model.mid.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    dist.barrier()
    for parameter in zero.optim.param_groups[0]["params"]:
        parameter.detach().fill_(rank + 1.0)
    dist.barrier()
    seen = {float(p.detach().flatten()[0]) for p in model.parameters()}
    assert seen <= {r + 1.0 for r in range(n)}
    assert len(seen) > 1
    dist.barrier()
    return {"files": {file_of(p) for p in model.parameters()}, "values": seen}


def shared_training(rank: int, n: int, ddp_first: bool) -> tuple[float, list[float]]:
    """Train under DDP with shared parameters and without the sharded optimizer; compare."""
    reference = Net()
    wrapped = dist.DistributedDataParallel(reference)
    plain = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    model = Net(seed=rank)
    ddp = dist.DistributedDataParallel(model) if ddp_first else model
    zero = dist.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, host_shared_parameters=True
    )
    ddp = ddp if ddp_first else dist.DistributedDataParallel(model)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        x = batch(data)
        losses.append(step(ddp, zero, x))
        assert losses[-1] == step(wrapped, plain, x)
    dist.barrier()
    assert equal(model, reference)
    zero.consolidate_state_dict()
    if rank == 0:
        mine, theirs = zero.state_dict()["state"], plain.state_dict()["state"]
        for number, entry in theirs.items():
            assert all(torch.equal(mine[number][key], entry[key]) for key in entry)
    dist.barrier()
    return sum(len(g["params"]) for g in zero.optim.param_groups), losses


def afterwards(rank: int, n: int) -> list[str]:
    """Treat a module whose parameters are shared as programs treat modules."""
    model = Net()
    zero = dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True
    )
    data = torch.Generator().manual_seed(1)
    step(model, zero, batch(data))
    dist.barrier()
    # Copies are of their own, and as long as what was copied.
    twin, alone = copy.deepcopy(model), copy.deepcopy(model.out)
    again = pickle.loads(pickle.dumps(model))
    saved = io.BytesIO()
    torch.save(model.out.state_dict(), saved)
    assert saved.tell() < 3 * (4 * model.out.weight.numel() + 4096)
    assert equal(model, twin) and equal(model, again) and equal(model.out, alone)
    assert twin.tied.weight is twin.mid.weight
    assert {file_of(p) for m in (twin, alone, again) for p in m.parameters()} == {""}
    # Loading writes the shared memory, the same values on all ranks.
    fresh = Net(seed=5)
    dist.barrier()  # when the others have compared
    model.load_state_dict(fresh.state_dict())
    dist.barrier()
    assert equal(model, fresh)
    where = [place_of(model.mid.weight)]
    dist.barrier()
    # Another dtype means other memory; the next step shares that.
    model.double()
    twin = copy.deepcopy(model)
    assert file_of(model.mid.weight) == ""
    zero.zero_grad()
    x = batch(data).double()
    model(x).square().mean().backward()
    zero.step()
    where.append(place_of(model.mid.weight))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(x).square().mean().backward()
    plain.step()
    dist.barrier()
    assert equal(model, twin)
    dist.barrier()
    return where


def memory_given_back(rank: int, n: int) -> tuple[int, int]:
    """Return how much private memory sharing gave back, and the size of the parameters, in KiB."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(32)))
    size = sum(p.numel() * p.element_size() for p in model.parameters()) // 1024
    small = nn.Linear(2, 2)  # what the first of all loads is no copy of the parameters
    dist.ZeroRedundancyOptimizer(small.parameters(), torch.optim.SGD, host_shared_parameters=True)
    look_at_all_pages(model)
    before = private_kib()
    zero = dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True
    )
    look_at_all_pages(model)  # what one rank alone has looked at counts as that rank's own
    dist.barrier()
    given_back = before - private_kib()
    assert len(zero.state) == 0
    dist.barrier()
    return given_back, size


def over_hosts(rank: int, n: int) -> dict[str, Any]:
    """Train on hosts that are only pretended; say where the parameters and the state are."""
    reference = Net()
    wrapped = dist.DistributedDataParallel(reference)
    plain = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    model = Net(seed=rank)
    ddp = dist.DistributedDataParallel(model)
    zero = dist.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, host_shared_parameters=True
    )
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = batch(data)
        assert step(ddp, zero, x) == step(wrapped, plain, x)
    dist.barrier()
    assert equal(model, reference)
    zero.consolidate_state_dict(to=n - 1)
    if rank == n - 1:
        mine, theirs = zero.state_dict()["state"], plain.state_dict()["state"]
        assert list(mine) == list(theirs)
        for number, entry in theirs.items():
            assert all(torch.equal(mine[number][key], entry[key]) for key in entry)
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    return {
        "host": next(host for host in group.hosts if rank in host),
        "files": {file_of(p) for p in model.parameters()},
        "numbers": set(zero.local_state_dict()["state"]),
    }


def refused(rank: int) -> str:
    """Ask for shared parameters where there is no shared memory; return the error's type."""
    try:
        dist.ZeroRedundancyOptimizer(
            Net().parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True
        )
    except dist.UsageError as error:
        return type(error).__name__
    return ""


def plain_training(rank: int, buckets: bool) -> bool:
    """Train under DDP with the sharded optimizer, whatever the backend; compare."""
    reference, model = Net(), Net()
    wrapped, ddp = dist.DistributedDataParallel(reference), dist.DistributedDataParallel(model)
    plain = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    zero = dist.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=buckets
    )
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = batch(data)
        assert step(ddp, zero, x) == step(wrapped, plain, x)
    zero.consolidate_state_dict(to=1)
    if rank == 1:
        mine, theirs = zero.state_dict()["state"], plain.state_dict()["state"]
        for number, entry in theirs.items():
            assert all(torch.equal(mine[number][key], entry[key]) for key in entry)
    return equal(model, reference)
