"""DTensors against torch's: names and arguments, parts of every rank, keys of counts."""

from __future__ import annotations

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
import dure.tensor.experimental
import dure.tensor.placement_types
from dure.testing import run_ranks


@pytest.mark.parametrize("module", ["", ".placement_types", ".debug", ".experimental"])
def test_names_and_arguments_are_those_of_torch(module):
    own, other = (
        __import__(f"{root}{module}", fromlist=["x"])
        for root in ("dure.tensor", "torch.distributed.tensor")
    )
    for name in getattr(other, "__all__", ["_StridedShard", "_MaskPartial", "Shard", "Partial"]):
        there, here = getattr(other, name), getattr(own, name)
        if not inspect.isfunction(there):
            continue
        wanted = [(p.name, p.kind) for p in inspect.signature(there).parameters.values()]
        given = [(p.name, p.kind) for p in inspect.signature(here).parameters.values()]
        if name in ("ones", "zeros", "empty", "full", "rand", "randn"):
            # torch's are keyword only after the size as well, in another order
            assert {n for n, _ in wanted} == {n for n, _ in given}, name
        else:
            assert [n for n, _ in given][: len(wanted)] == [n for n, _ in wanted], name


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


@pytest.mark.parametrize("size", [8, 5, 3, 1, 0])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2)])
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
