"""DTensors against torch's: names and arguments, parts of every rank, keys of counts."""

from __future__ import annotations

import importlib
import inspect
import itertools
import warnings

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dure.tensor as ours
import dure.tensor.debug
from dure.testing import run_ranks

MODULES = {
    "tensor": [],
    "tensor.placement_types": ["_StridedShard", "_MaskPartial", "Shard", "Partial", "Replicate"],
    "tensor.debug": [],
    "tensor.experimental": [],
    "tensor.parallel": [],
    "tensor.parallel.input_reshard": [],
    "tensor.device_mesh": ["DeviceMesh", "init_device_mesh"],
    "_tensor": ["DTensor", "distribute_tensor", "init_device_mesh", "zeros", "Shard"],
    "_tensor.placement_types": ["Shard", "Replicate", "Partial"],
    "_tensor.experimental": [],
    "_tensor.device_mesh": [],
    "device_mesh": [],
}
METHODS = {
    "DTensor": ["from_local", "to_local", "redistribute", "full_tensor"],
    "DeviceMesh": [
        "__init__", "from_group", "size", "get_rank", "get_local_rank", "get_coordinate",
        "get_group", "get_all_groups", "_flatten", "_unflatten", "_concatenate",
        "_get_all_submeshes", "_get_root_mesh", "__getitem__",
    ],
    "CommDebugMode": [
        "get_total_counts", "get_comm_counts", "get_parameter_info", "get_sharding_info",
        "generate_comm_debug_tracing_table", "generate_json_dump",
        "log_comm_debug_tracing_table_to_file",
    ],
    "ParallelStyle": ["_apply"],
    **{
        style: ["__init__", "_apply"]
        for style in (
            "ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput",
            "PrepareModuleOutput", "PrepareModuleInputOutput",
        )
    },
}  # fmt: skip
VALUES = {
    "DTensor": ["device_mesh", "placements", "_local_tensor", "_spec", "data", "grad"],
    "DeviceMesh": ["mesh", "shape", "ndim", "mesh_dim_names", "device_type"],
    "Placement": ["is_shard", "is_replicate", "is_partial"],
    "Shard": ["local_shard_size_and_offset", "is_shard", "is_replicate", "is_partial"],
}
"""What torch's classes have that Python cannot look into, or that are no functions."""


def arguments(function):
    """Names, kinds and whether there is a default; not those that only torch's inside passes."""
    inside = ("_layout", "_rank_map", "_root_mesh")
    return {
        p.name: (p.kind, p.default if isinstance(p.default, (int, str, type(None))) else "...")
        for p in inspect.signature(function).parameters.values()
        if p.name not in inside
    }


@pytest.mark.parametrize("module", MODULES)
def test_names_and_arguments_are_those_of_torch(module):
    own = importlib.import_module(f"dure.{module}")
    other = importlib.import_module(f"torch.distributed.{module}")
    names = [*getattr(other, "__all__", []), *MODULES[module]]
    assert names
    for name in names:
        there, here = getattr(other, name), getattr(own, name)
        if inspect.isfunction(there):
            wanted, given = arguments(there), arguments(here)
            assert wanted == given, name
            if name not in ("zeros", "rand", "randn"):  # keyword only, in an order of their own
                assert list(wanted) == list(given), name
        for method in METHODS.get(name, []):
            wanted, given = arguments(getattr(there, method)), arguments(getattr(here, method))
            assert list(wanted.items()) == list(given.items()), f"{name}.{method}"
        for value in VALUES.get(name, []):
            assert hasattr(there, value), value
            assert hasattr(here, value), f"{name}.{value}"


def placements_of(package, ndim):
    one = [package.Replicate(), package.Shard(0), package.Shard(1)]
    return list(itertools.product(one, repeat=ndim))


def parts(package, mesh, size):
    whole = torch.arange(size * 3.0).reshape(size, 3)
    found = []
    for placements in placements_of(package, mesh.ndim):
        made = package.distribute_tensor(whole, mesh, placements, src_data_rank=None)
        found.append((str(placements), made.to_local().tolist(), made.shape, made.stride()))
    return found


def torch_parts(rank, shape, size):
    world = torch.Size(shape).numel()
    torch_dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parts(theirs, init_torch_mesh("cpu", shape), size)
    finally:
        torch_dist.destroy_process_group()


@pytest.mark.parametrize("size", [8, 5, 1, 0])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_every_rank_has_the_part_that_torch_gives_it(shape, size):
    def body(rank):
        return parts(ours, ours.init_device_mesh("cpu", shape), size)

    for rank, got in enumerate(run_ranks(torch.Size(shape).numel(), body)):
        for own, other in zip(got, torch_parts(rank, shape, size), strict=True):
            assert own[0] == other[0]
            assert torch.equal(torch.tensor(own[1]).flatten(), torch.tensor(other[1]).flatten())
            assert own[2:] == other[2:], own[0]


def test_torchs_operators_find_the_counts():
    def body(rank):
        mesh = ours.init_device_mesh("cpu", (2,))
        rows = ours.distribute_tensor(torch.ones(4, 4), mesh, [ours.Shard(0)])
        with dure.tensor.debug.CommDebugMode() as mode:
            rows.full_tensor()
        counts = mode.get_comm_counts()
        for namespace in (torch.ops.c10d_functional, torch.ops._c10d_functional):
            assert counts[namespace.all_gather_into_tensor] == 1
            assert counts[namespace.all_reduce] == 0
        assert counts == {torch.ops.c10d_functional.all_gather_into_tensor: 1}
        assert counts[torch.ops.c10d.allgather_] == 0

    run_ranks(2, body)
