"""Device meshes: what their axes are, whose groups they have, and what is refused."""

# pyright: reportArgumentType=false

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dure as dist
from dure.comm.world import new_world
from dure.device_mesh import DeviceMesh, init_device_mesh
from dure.errors import AxisError, Desync, MeshError, NotInGroupError, UsageError
from dure.mesh import current_mesh
from dure.testing import run_ranks
from tests.thread_ranks import on_mesh, on_ranks

NAMES = ("dp", "cp", "tp")


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)


# ---- what it is ----------------------------------------------------------------------------------


@on_ranks(3)
def test_a_rank_outside_knows_the_ranks_of_slices_with_all_axes(rank: int) -> None:
    mesh = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("a", "b"))
    assert mesh["b"].mesh.tolist() == mesh._flatten("all").mesh.tolist() == [1, 0]
    assert mesh["b", "a"].mesh.tolist() == [[1], [0]]
    if rank == 2:
        with pytest.raises(MeshError):  # of two slices it is in none
            _ = mesh["a"].mesh


def test_a_mesh_makes_the_default_group_where_there_is_none(monkeypatch, port):
    given = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    with new_world():
        mesh = init_device_mesh("cpu", (1,))
        try:
            assert dist.get_world_size() == 1
            assert mesh.get_group() is dist.group.WORLD
        finally:
            dist.destroy_process_group()


# ---- its axes ------------------------------------------------------------------------------------


def test_sub_meshes_take_axes_in_any_order_and_share_groups():
    def body(rank):
        mesh = cube()
        sub = mesh["tp", "dp"]
        assert sub.get_group("tp") is mesh.get_group("tp")
        assert sub["dp"] is mesh["dp"]
        assert mesh[NAMES] is mesh
        assert sub._get_root_mesh() is mesh
        assert mesh["cp"].get_local_rank() == rank // 2 % 2
        return sub.mesh.tolist(), sub.get_coordinate()

    found = run_ranks(8, body)
    assert found[0] == ([[0, 4], [1, 5]], (0, 0))
    assert found[7] == ([[2, 6], [3, 7]], (1, 1))


def test_flattened_axes_are_named_in_the_root():
    def body(rank):
        mesh = cube()
        flat = mesh["dp", "tp"]._flatten()
        assert mesh["dp_tp"] is flat is mesh["dp", "tp"]._flatten()
        assert mesh.get_group("dp_tp") is flat.get_group()
        assert mesh["dp_tp", "cp"].shape == (4, 2)
        assert mesh["dp", "tp"]["dp_tp"] is flat
        with pytest.raises(MeshError):
            mesh["cp"]["dp_tp"]  # ranks beyond the sub-mesh
        with pytest.raises(MeshError):
            mesh["dp_tp", "dp"]  # ranks twice
        with pytest.raises(MeshError):
            mesh["dp", "cp"]._flatten("dp_tp")  # the name means other ranks
        with pytest.raises(MeshError):
            mesh["dp", "cp"]._flatten("tp")
        return flat.mesh.tolist()

    found = run_ranks(8, body)
    assert found[0] == found[5] == [0, 1, 4, 5]
    assert found[2] == [2, 3, 6, 7]


def test_an_axis_is_split_and_meshes_are_joined():
    def body(rank):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        split = mesh._unflatten("world", (2, 2, 2), NAMES)
        assert split.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert split._unflatten("dp", (2, 1), ("a", "b")).shape == (2, 1, 2, 2)
        joined = DeviceMesh._concatenate([split["tp"], split["dp"]])
        assert joined is split["tp", "dp"]
        with pytest.raises(MeshError):
            DeviceMesh._concatenate([split["dp"], split["dp"]])
        with pytest.raises(MeshError):
            DeviceMesh._concatenate([split["dp"], init_device_mesh("cpu", (8,))])
        with pytest.raises(MeshError):
            mesh._unflatten(0, (3, 2), ("a", "b"))
        with pytest.raises(MeshError):
            mesh._unflatten(0, (4, 2), ("a",))
        return [split.get_group(name).global_ranks for name in NAMES]

    assert run_ranks(8, body)[5] == [(1, 5), (5, 7), (4, 5)]


@on_ranks(4)
def test_a_mesh_over_groups_that_exist(rank):
    world = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("x",))
    assert world.get_group("x") is dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2))
    groups = mesh.get_all_groups()
    again = DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=("a", "b"))
    assert again.get_all_groups() == groups
    with pytest.raises(MeshError):
        DeviceMesh.from_group(groups[::-1], "cpu", mesh.mesh, mesh_dim_names=("a", "b"))
    with pytest.raises(MeshError):
        DeviceMesh.from_group(groups, "cpu")
    with pytest.raises(MeshError):
        DeviceMesh.from_group(groups[0], "cpu", [0, 1, 2, 3])


# ---- as a value ----------------------------------------------------------------------------------


@on_mesh(2, 2, names=("a", "b"))
def test_equality_is_of_ranks_shape_names_and_device(mesh):
    same = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    others = [
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "c")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")),
        DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b")),
        DeviceMesh("meta", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), _init_backend=False),
    ]
    assert mesh == same
    assert hash(mesh) == hash(same)
    assert all(mesh != other for other in others)
    assert mesh != "a mesh"
    assert len({mesh, same, *others}) == 5


@on_ranks(8)
def test_pickled_meshes_find_their_groups_again(rank):
    mesh = cube()
    flat = mesh["dp", "cp"]._flatten()
    for one in (mesh, mesh["tp"], mesh["cp", "dp"], flat):
        assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(mesh) is mesh
    alone = DeviceMesh("cpu", [[7, 0]], _init_backend=False)
    found = pickle.loads(pickle.dumps(alone))
    assert found == alone
    with pytest.raises((MeshError, NotInGroupError)):
        found.get_group(1)


@on_ranks(2)
def test_the_mesh_that_was_entered_last_is_the_current_one(rank):
    a, b = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    assert current_mesh() is None
    with a:
        with b as entered:
            assert entered is b
            assert current_mesh() is b
        with pytest.raises(KeyError), b:
            raise KeyError
        assert current_mesh() is a
    assert current_mesh() is None


# ---- who takes a mesh ----------------------------------------------------------------------------


def test_groups_and_samplers_take_a_mesh():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = dist.new_group(mesh=mesh["tp"])
        assert group.global_ranks == mesh["tp"].get_group().global_ranks
        assert group is not mesh["tp"].get_group()
        assert dist.new_group(mesh=mesh).global_ranks == (0, 1, 2, 3)
        with pytest.raises(UsageError):
            dist.new_group([0], mesh=mesh)
        data = range(6)
        with pytest.raises(UsageError):
            dist.DistributedSampler(data, mesh=init_device_mesh("cpu", (2, 2)))
        with pytest.raises(UsageError):
            dist.DistributedSampler(data, num_replicas=2, rank=0, mesh=mesh)
        alone = dist.DistributedSampler(data, shuffle=False, mesh=mesh["tp"])
        assert list(alone) == [[0, 2, 4], [1, 3, 5]][rank % 2]
        return list(dist.DistributedSampler(data, shuffle=False, mesh=mesh))

    assert run_ranks(4, body) == [[0, 2, 4], [0, 2, 4], [1, 3, 5], [1, 3, 5]]


# ---- what is refused -----------------------------------------------------------------------------


@on_ranks(2)
def test_a_mesh_larger_than_the_world_names_both_sizes(rank):
    with pytest.raises(MeshError) as caught:
        init_device_mesh("cpu", (2, 2))
    assert "(2, 2) has 4 ranks, the world 2" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: init_device_mesh("cpu", (2, 0)),
        lambda: init_device_mesh("cpu:0", (2,)),
        lambda: init_device_mesh(torch.device("cpu"), (2,)),
        lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b")),
        lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "a")),
        lambda: init_device_mesh("cpu", (2,), backend_override={1: "gloo"}),
        lambda: DeviceMesh("cpu"),
        lambda: DeviceMesh("cpu", [[0, 1], [1]]),
        lambda: DeviceMesh("cpu", [0, 0]),
        lambda: DeviceMesh("cpu", [0, 2]),
        lambda: DeviceMesh("cpu", [0.0, 1.0]),
        lambda: init_device_mesh("cpu", (2,)).get_group("dp"),
        lambda: init_device_mesh("cpu", (2,)).get_group(1),
        lambda: init_device_mesh("cpu", (2, 1)).get_group(),
        lambda: init_device_mesh("cpu", (2, 1)).get_local_rank(),
        lambda: init_device_mesh("cpu", (2,))["dp"],
        lambda: init_device_mesh("cpu", (2,))._flatten(),
        lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("a",))["b"],
    ],
)
@on_ranks(2)
def test_what_one_rank_can_see_is_refused_on_each(rank, make):
    with pytest.raises(MeshError):
        make()


def test_ranks_that_give_different_meshes_are_told_apart():
    def body(rank):
        with pytest.raises(Desync) as caught:
            init_device_mesh("cpu", (2, 2) if rank else (4, 1))
        return caught.value.calls

    for calls in run_ranks(4, body):
        assert set(calls) == {0, 1, 2, 3}
        assert "test_device_mesh.py" in calls[0]


def test_a_wrong_axis_is_the_error_that_torch_has():
    """A number that is out of range is an IndexError, a name that does not exist a KeyError."""
    names = {"mesh_dim_names": ("a", "b")}

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 1), **names)
        for call in (mesh.size, mesh.get_group, mesh.get_local_rank):
            for axis in (2, -3):
                with pytest.raises(IndexError) as caught:
                    call(axis)
                assert isinstance(caught.value, AxisError)
        for call in (mesh.get_group, mesh.get_local_rank, mesh.__getitem__):
            with pytest.raises(KeyError) as missing:
                call("c")
            assert type(missing.value) is MeshError
        with pytest.raises(RuntimeError):
            init_device_mesh("cpu", (2,))["a"]

    run_ranks(2, body)
