"""What ranks do in the tests of fully sharded training with real processes."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp

import dure as dist
import dure.fsdp
from dure.errors import PeerLost
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
