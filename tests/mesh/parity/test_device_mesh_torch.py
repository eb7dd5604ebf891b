"""Device meshes against torch's, which run over its fake backend: every rank's view of each."""

import warnings

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dure as dist
from dure.device_mesh import DeviceMesh, init_device_mesh
from dure.testing import run_ranks

CASES = [
    ((2, 3), ("dp", "tp"), [("dp",), ("tp",)]),
    ((2, 2, 2), ("dp", "cp", "tp"), [("dp",), ("cp",), ("tp",), ("dp", "cp"), ("dp", "tp")]),
    ((1, 4), ("dp", "tp"), [("dp",), ("tp",)]),
    ((2, 1, 3), ("a", "b", "c"), [("a", "c"), ("b", "c")]),
]


def shown(mesh):
    """The representation; torch gives axes of one rank the stride (), we 1."""
    return repr(mesh).replace("()", "1")


def views(mesh, slices, ranks_of):
    """What a rank sees of a mesh, its sub-meshes, and these flattened."""
    seen = []
    for names in [mesh.mesh_dim_names, *slices]:
        sub = mesh[names]
        flat = sub._flatten() if len(names) > 1 else sub
        groups = [ranks_of(group) for group in (*sub.get_all_groups(), flat.get_group())]
        local = [sub.get_local_rank(name) for name in names]
        seen.append((sub.mesh.tolist(), flat.mesh.tolist(), groups, local, sub.shape, sub.size()))
        seen.append((shown(sub), sub.get_coordinate(), sub.mesh_dim_names))
    split = mesh._unflatten(mesh.ndim - 1, (mesh.shape[-1], 1), ("x", "y"))
    seen.append((split.mesh.tolist(), split["x"].mesh.tolist(), shown(split["x"])))
    return seen


def torch_views(rank, shape, names, slices):
    size = torch.Size(shape).numel()
    torch_dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_torch_mesh("cpu", shape, mesh_dim_names=names)
            return views(mesh, slices, torch_dist.get_process_group_ranks)
    finally:
        torch_dist.destroy_process_group()


@pytest.mark.parametrize(("shape", "names", "slices"), CASES)
def test_every_rank_sees_what_torch_shows(shape, names, slices):
    def body(rank):
        return views(
            init_device_mesh("cpu", shape, mesh_dim_names=names),
            slices,
            dist.get_process_group_ranks,
        )

    size = torch.Size(shape).numel()
    for rank, ours in enumerate(run_ranks(size, body)):
        assert ours == torch_views(rank, shape, names, slices)


@pytest.mark.parametrize("array", [[[3, 1], [0, 2]], [4, 0], [[[5]], [[2]]]])
def test_explicit_arrays_are_seen_alike(array):
    def seen(mesh):
        return mesh.mesh.tolist(), mesh.get_coordinate(), mesh.shape, shown(mesh)

    def body(rank):
        return seen(DeviceMesh("cpu", array))

    for rank, ours in enumerate(run_ranks(6, body)):
        assert ours == seen(TorchMesh("cpu", array, _init_backend=False, _rank=rank))
