"""What ranks do in the tests of fully sharded training with real processes."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn

import dure as dist
import dure.fsdp
from dure.comm.memory import heap_trim
from dure.errors import PeerLost
from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.training.memory import give_back_freed
from procs import torch_ranks
from procs.forked_ranks import Slot

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _batch(step: int) -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.double)


def _sharded(way: str, mesh: Any = None) -> Net:
    model = Net()
    with strategy(way):
        for layer in model.layers[:2]:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


def _train(model: nn.Module, size: int, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_batch(step).chunk(size)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trains_as_one(rank: int, n: int, way: str, replicas: int = 1) -> tuple[list[float], float]:
    """Return the losses, and how far weights are from those of one rank that has all rows."""
    mesh = None
    if replicas > 1:
        mesh = dist.init_device_mesh(
            "cpu", (replicas, n // replicas), mesh_dim_names=("replicate", "shard")
        )
    expected = Net()
    _train(expected, 1, 0)
    model = _sharded(way, mesh)
    losses = _train(model, n, rank)
    far = 0.0
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(one, DTensor)
        far = max(far, float((one.full_tensor() - other).detach().abs().max()))
    return losses, far


def over_hosts(rank: int, folder: str) -> None:
    """Train on four ranks of two hosts, as on one rank; see tests/procs/over_hosts.py."""
    for way in ("shared", "gathered"):
        assert trains_as_one(rank, 4, way)[1] < 1e-12


def loses_one(slot: Slot, way: str, phase: str) -> tuple[str, list[str]]:
    """Rank 1 is killed in a phase of the third step; return what rank 0 is told."""
    dist.init_process_group("shm", init_method=slot.url, rank=slot.rank, world_size=slot.size)
    model = _sharded(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dying = False

    def die(*_: object) -> None:
        if dying and slot.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if phase == "step":
        optimizer.register_step_pre_hook(die)
    elif phase == "forward":
        model.layers[1].register_forward_hook(die)
    else:
        model.layers[1].register_full_backward_hook(die)
    try:
        for step in range(6):
            dying = step == 2
            optimizer.zero_grad()
            model(_batch(step)).square().mean().backward()
            optimizer.step()
    except PeerLost as error:
        return type(error).__name__, list(getattr(error, "__notes__", []))
    raise AssertionError("no rank was lost")


def equals_torch(rank: int, folder: str, way: str, low: bool) -> tuple[float, float, float]:
    """Train under torch's FSDP2 on gloo, and under Dure's; return the largest differences.

    Returns:
        Of losses, of the last gradients, of weights.
    """
    with torch_ranks.world(rank, folder, "gloo"):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        expected = _trained(Net(), torch.distributed.fsdp, mesh, rank, low)
    with strategy(way):
        got = _trained(Net(), dure.fsdp, None, rank, low)
    losses, *tensors = (
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(got, expected, strict=True)
    )
    return losses, tensors[0], tensors[1]


def _trained(
    model: Net, fsdp: Any, mesh: Any, rank: int, low: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    policy = fsdp.MixedPrecisionPolicy()
    if low:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        model.float()
    for module in (*model.layers, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    losses = torch.tensor(_train(model, 2, rank))
    parameters: list[Any] = list(model.parameters())
    gradients = [p.grad.full_tensor().detach() for p in parameters]
    return [losses], gradients, [p.full_tensor().detach() for p in parameters]


def gives_memory_back(rank: int, way: str, folder: str) -> tuple[list[float], bool]:
    """Offload a model and its optimizer.

    Returns:
        MB of this process that they take in training, offloaded, and brought back; and whether the
        weights are the same then.
    """
    width, layers = 1024, 6  # 24 MB of weights, and as much of gradients and each of two states
    warm = nn.Linear(width, width)
    warm(torch.ones(64, width)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    del warm
    gc.collect()  # what an earlier test has left would be given back later, and be missed
    heap_trim()
    give_back_freed()
    before = _resident()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with strategy(way):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(64, width)).sum().backward()
        optimizer.step()
    weights: list[Any] = [p.full_tensor().detach() for p in model.parameters()]
    sums = [float(w.double().sum()) for w in weights]
    del weights
    resident = [_resident() - before]
    dure.fsdp.offload(model, optimizer, folder=folder)
    dist.barrier()
    resident.append(_resident() - before)
    dist.barrier()
    dure.fsdp.onload(model)
    dist.barrier()
    resident.append(_resident() - before)
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return resident, sums == [float(w.double().sum()) for w in weights]


def _resident() -> float:
    """MB of memory that this process has."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(row.split()[1]) / 1e3 for row in file if row.startswith("Rss:"))
