"""Collectives along one axis of a mesh of 2 x 2."""

import torch

from dure.tensor import init_device_mesh
from dure.tensor._collective_utils import (
    mesh_broadcast,
    mesh_scatter,
    shard_dim_alltoall,
)
from dure.testing import run_ranks


def test_collectives_stay_within_the_ranks_of_an_axis():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.tensor([float(rank)])
        mesh_broadcast(x, mesh, 0, group_src=1)
        part = torch.empty(1)
        parts = [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
        work = mesh_scatter(part, parts, mesh, mesh_dim=1, async_op=True)
        assert work is not None
        work.wait()
        rows = torch.arange(4.0)[None] + 4 * mesh.get_local_rank(1)
        columns = shard_dim_alltoall(rows, 0, 1, mesh, 1)
        uneven = shard_dim_alltoall(rows[:, :3], 0, 1, mesh, 1)
        assert uneven.tolist() == columns[:, : uneven.size(1)].tolist()
        assert uneven.size(1) == 2 - mesh.get_local_rank(1) and uneven.is_contiguous()
        assert mesh_broadcast(torch.empty(1, device="meta"), mesh) is None
        assert mesh_scatter(torch.empty(1, device="meta"), parts, mesh) is None
        assert shard_dim_alltoall(rows.to("meta"), 0, 1, mesh, 1).shape == columns.shape
        return x.item(), part.item(), columns.tolist()

    left, right = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert run_ranks(4, body) == [(2, 0, left), (3, 1, right), (2, 20, left), (3, 21, right)]
