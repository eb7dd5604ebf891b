"""Device meshes over processes: who leaves an axis, and what the groups of meshes hold."""

from __future__ import annotations

import torch

import dure as dist
from dure.device_mesh import init_device_mesh
from dure.errors import CommError, PeerLost
from dure.mesh import memory


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


def holds(rank: int) -> list[tuple[int, int, int]]:
    """Two meshes of equal ranks, of which the first is used; what their groups hold."""
    begun = memory()
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2)]
    dist.all_reduce(torch.ones(1 << 18), group=meshes[0].get_group("dp"))
    kept = dist.shared_empty(1 << 18)
    held = memory()
    del kept
    names = [group.group_name for mesh in meshes for group in mesh.get_all_groups()]
    groups = [group for group in held.groups if group.name in names]  # without earlier tests'
    assert [group.name for group in groups] == names
    assert [group.desc for group in groups] == ["mesh_dp", "mesh_tp"] * 2
    assert "mesh_tp" in str(held).splitlines()[-2]
    if groups[0].backend == "shm":
        assert held.heap_bytes - begun.heap_bytes >= 1 << 20
    return [(g.reserved_bytes, g.used_bytes, g.connections) for g in groups]


def test_groups_tell_what_they_hold_and_slots_take_memory_when_they_are_used(process_pool):
    for held in process_pool(4, "shm").run(holds):
        reserved, used, connections = (list(column) for column in zip(*held, strict=True))
        assert len(set(reserved)) == 1
        assert set(connections) == {0}
        assert used[0] >= 1 << 18  # the message went through slots
        for unused in used[1:]:
            assert 0 < unused < 1 << 17
            assert unused < reserved[0] // 4
    for held in process_pool(4, "gloo").run(holds):
        assert held == [(0, 0, 1)] * 4
