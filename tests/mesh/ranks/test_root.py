"""Groups of meshes: which they share, and how many there are."""

# pyright: reportArgumentType=false

import torch

import dure as dist
from dure.comm.world import current_world
from dure.device_mesh import DeviceMesh, init_device_mesh
from tests.thread_ranks import on_ranks


@on_ranks(4)
def test_the_first_axis_that_is_the_world_uses_the_default_group_and_others_have_their_own(rank):
    assert DeviceMesh("cpu", [3, 2, 1, 0]).get_group() is not dist.group.WORLD
    first, second = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (4,))
    assert first == second
    assert first.get_group() is dist.group.WORLD
    assert second.get_group().global_ranks == (0, 1, 2, 3)
    assert second.get_group() is not dist.group.WORLD
    assert init_device_mesh("cpu", (1, 4)).get_group(1) is not dist.group.WORLD
    grids = [init_device_mesh("cpu", (2, 2)) for _ in range(2)]
    assert grids[0] == grids[1]
    assert grids[0].get_group(1) is not grids[1].get_group(1)
    assert grids[0].number != grids[1].number
    assert dist.group.WORLD is not grids[0].get_group(0)


@on_ranks(3)
def test_a_mesh_made_again_and_again_has_the_groups_of_one_of_four(rank):
    def made():
        return DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))

    own = [made() for _ in range(4)]
    before = len(current_world().groups)
    again = [made() for _ in range(6)]
    assert len(current_world().groups) == before
    if rank < 2:
        groups = [mesh.get_group("tp") for mesh in own]
        assert len(set(groups)) == 4
        assert [mesh.get_group("tp") for mesh in again] == groups + groups[:2]
        flat = own[1]._flatten("all")  # the axis is there: of size 2, as tp
        assert again[1]._flatten("all").get_group() is flat.get_group()
        dist.destroy_process_group(groups[2])
    other = made()  # on rank 2 too, which has not left
    if rank < 2:
        assert other.get_group("tp") not in groups
        dist.all_reduce(torch.ones(1), group=other.get_group("tp"))
