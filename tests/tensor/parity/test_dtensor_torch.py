"""DTensors against torch's: names and arguments, parts of every rank, keys of counts."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dure.tensor as ours
from dure.testing import run_ranks


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
