"""Device meshes over processes: a rank that leaves one axis."""

from __future__ import annotations

import torch

import dure as dist
from dure.device_mesh import init_device_mesh
from dure.errors import CommError, PeerLost


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
