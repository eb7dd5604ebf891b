"""Device meshes over processes: all axes at once, on several backends, and torch's own plug-in."""

from __future__ import annotations

import time

import pytest
import torch

import dure as dist
from dure.comm import functional
from dure.device_mesh import init_device_mesh
from dure.errors import CommError, PeerLost


def sums(rank: int) -> tuple[list[float], float]:
    """Return what an all_reduce along each axis gives, and how long making the mesh took."""
    dist.barrier()
    began = time.perf_counter()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    took = time.perf_counter() - began
    x = torch.tensor([float(rank)])
    found = [functional.all_reduce(x, "sum", (mesh, axis)).item() for axis in range(3)]
    return found, took


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_axes_of_a_mesh_of_8_processes(process_pool, backend):
    found = process_pool(8, backend).run(sums)
    for rank, (got, _) in enumerate(found):
        assert got == [rank + (rank ^ 4), rank + (rank ^ 2), rank + (rank ^ 1)]


def dies_on_its_axis(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seen = []
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        if rank == 3:
            group.close(abort=True)
            continue
        try:
            dist.all_reduce(torch.ones(1), group=group)
            seen.append("well")
        except PeerLost as error:
            seen.append(f"lost {error.rank is not None}")
        except CommError as error:
            seen.append(type(error).__name__)
    return seen


def test_who_leaves_an_axis_is_missed_on_it_alone(process_pool):
    assert process_pool(4, "shm").run(dies_on_its_axis) == [
        ["well", "well"],
        ["lost True", "well"],
        ["well", "lost True"],
        [],
    ]
