"""What ranks do in the tests of fully sharded training with real processes."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn

import dure as dist
import dure.fsdp
from dure.comm import memory
from dure.comm.memory import heap_trim
from dure.errors import PeerLost
from dure.fsdp import fully_shard, strategy
from dure.training.memory import give_back_freed
from tests.comm.forked_ranks import Slot
from tests.parallel.fsdp.ranks.fsdp_models import (
    Tensors,
    adamw,
    assert_same,
    by_step,
    expected_weights,
    full_weights,
    sharded,
    trained,
)
from tests.torch_backend import torch_worlds as torch_ranks


def trains(rank: int, n: int, way: str, replicas: int = 1) -> tuple[list[float], Tensors]:
    """Return the losses of some steps, and the weights after them."""
    mesh = None
    if replicas > 1:
        mesh = dist.init_device_mesh(
            "cpu", (replicas, n // replicas), mesh_dim_names=("replicate", "shard")
        )
    model = sharded(way, mesh=mesh)
    losses = trained(model, lambda m, step: by_step(m, step, n, rank), adamw)
    return [loss.item() for loss in losses], full_weights(model)


def over_hosts(rank: int, folder: str) -> None:
    """Train on four ranks of two hosts, as on one rank; see tests/comm/over_hosts.py."""
    for way in ("shared", "gathered"):
        assert_same(trains(rank, 4, way)[1], expected_weights())


def loses_one(slot: Slot, way: str, phase: str) -> tuple[str, list[str]]:
    """Kill rank 1 in a phase of the third step; return the type and notes of rank 0's error."""
    dist.init_process_group("shm", init_method=slot.url, rank=slot.rank, world_size=slot.size)
    model = sharded(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dying = False

    def die(*_: object) -> None:
        if dying and slot.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if phase == "step":
        optimizer.register_step_pre_hook(die)
    elif phase == "forward":
        model.blocks[1].register_forward_hook(die)
    else:
        model.blocks[1].register_full_backward_hook(die)
    try:
        for step in range(6):
            dying = step == 2
            optimizer.zero_grad()
            by_step(model, step, 2, slot.rank)
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
        expected = _trained(torch.distributed.fsdp, mesh, rank, low)
    with strategy(way):
        got = _trained(dure.fsdp, None, rank, low)
    losses, *tensors = (
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(got, expected, strict=True)
    )
    return losses, tensors[0], tensors[1]


def _trained(
    fsdp: Any, mesh: Any, rank: int, low: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    policy = fsdp.MixedPrecisionPolicy()
    if low:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.to(torch.float32 if low else torch.float64)
    for module in (model[0], model[2], model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)

    def step_loss(model: nn.Module, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(12, 5, generator=generator, dtype=torch.double).chunk(2)[rank]
        loss = model(rows.float() if low else rows).square().mean()
        loss.backward()
        return loss

    losses = trained(model, step_loss, adamw)
    parameters: list[Any] = list(model.parameters())
    gradients = [p.grad.full_tensor().detach() for p in parameters]
    return losses, gradients, [p.full_tensor().detach() for p in parameters]


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


def warnings_of_a_fork(rank: int) -> list[str]:
    """Fork after a step with shared parameters, and return the warnings."""
    with strategy("shared"):
        model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        patch.setattr(memory, "_has_warned", False)
        warnings.simplefilter("always")
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return [str(w.message) for w in seen if "shared_empty" in str(w.message)]
