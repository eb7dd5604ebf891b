"""Which indices of a dimension each rank has; what tables of specs and plans keep alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import PlacementError, UsageError
from dure.fsdp import fully_shard
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from dure.tensor._dtensor_spec import DTensorSpec, TensorMeta
from dure.tensor._utils import compute_local_shape_and_global_offset
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.tensor.spec import cuts_of, runs_of
from dure.testing import run_ranks
from tests.tensor.ranks.dtensor_worlds import all_cuts, placements_of
from tests.tensor.ranks.parts import coordinates, order_of_cuts, part_of


def train() -> list[weakref.ref[Any]]:
    """Use specs and plans of a mesh, leave the job, and return mesh and group, weakly."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.ones(2, 4)).sum().backward()
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    sharded(torch.ones(2, 4)).sum().backward()
    tensor: Any = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (tensor @ tensor.redistribute(placements=[Shard(1)])).mean().full_tensor()
    assert isinstance(tensor.sum(0).placements[0], Partial)
    assert tensor.redistribute(placements=[Replicate()]).max().item() == 1
    group = dist.new_group()
    dist.barrier(group)
    refs = [weakref.ref(each) for each in (mesh, dist.group.WORLD, group)]
    dist.destroy_process_group()
    return refs


def test_nothing_keeps_meshes_and_groups_that_were_left():
    refs = run_ranks(2, lambda rank: train())
    gc.collect()
    gc.collect()  # what C++ releases in the first round may hold more
    assert [ref() for rank in refs for ref in rank] == [None] * 6


def test_shape_and_offset_of_each_part_are_found_by_the_name_of_torch():
    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        outside = dist.DeviceMesh("cpu", [0])
        found = compute_local_shape_and_global_offset((4, 2), mesh, [Shard(-2)])
        assert compute_local_shape_and_global_offset((4,), mesh, [Replicate()], True) == ((4,), ())
        if rank:
            empty = compute_local_shape_and_global_offset((4, 2), outside, [Shard(0)])
            assert empty == ((0,), ())
        return found

    assert run_ranks(3, body) == [((2, 2), (0, 0)), ((2, 2), (2, 0)), ((0, 2), (4, 0))]


def test_a_spec_that_a_program_makes_is_that_of_a_tensor_and_makes_one():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
        meta = TensorMeta(shape=torch.Size([3, 2]), stride=(2, 1), dtype=torch.float32)
        spec = DTensorSpec(mesh, [Shard(-2)], tensor_meta=meta)
        of_tensor = tensor._spec
        assert (spec.placements, spec.meta) == (of_tensor.placements, of_tensor.meta)
        assert spec.dim_map == [0, -1]
        assert (spec.tensor_meta.shape, spec.stride) == (torch.Size([3, 2]), (2, 1))
        made = DTensor(tensor.to_local(), spec, requires_grad=True)
        (made * 2).sum().backward()
        assert made.grad is not None
        assert made.grad.full_tensor().tolist() == [[2, 2]] * 3
        assert not DTensor(torch.ones(2 - rank, 2, requires_grad=True), spec).requires_grad
        with pytest.raises(UsageError):
            DTensorSpec(mesh, (Shard(0),), None)  # pyright: ignore[reportArgumentType]
        with pytest.raises(PlacementError):
            DTensorSpec(mesh, (Shard(0), Shard(1)), meta)

    with pytest.warns(UserWarning, match="from_local"):
        run_ranks(2, body)


# --------------------------------------------------------------------------------------------------
# Which indices of a dimension each rank has, in the order of cuts that placements say.


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3, 2)], ids=str)
def test_placements_say_the_order_of_cuts(sizes):
    for cuts, partial in all_cuts(sizes, 2, ["sum"]):
        placements = placements_of(cuts, sizes, partial)
        for dim, order in enumerate(cuts):
            # The library and the oracle of all other tests read the same.
            assert [cut.axis for cut in cuts_of(placements, sizes, dim)] == list(order)
            assert order_of_cuts(placements, sizes, dim) == [(axis, 1) for axis in order]


@pytest.mark.parametrize("size", [12, 7, 1, 0])
@pytest.mark.parametrize("sizes", [(3,), (3, 2), (2, 3, 2)], ids=str)
def test_each_rank_has_the_indices_that_chunks_leave_it(sizes, size):
    for cuts, _ in all_cuts(sizes, 1, ()):
        placements = placements_of(cuts, sizes, {})
        for coordinate in coordinates(sizes):
            runs = runs_of(size, cuts_of(placements, sizes, 0), sizes, coordinate)
            found = [index for length, offset in runs for index in range(offset, offset + length)]
            expected = part_of(torch.arange(size), placements, sizes, coordinate)
            assert found == expected.tolist(), placements
