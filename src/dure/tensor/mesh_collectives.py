"""Collectives along one axis of a mesh, under the names that torch's DTensor has for them.

Programs that place tensors by hand use them. Each is a collective of the axis's ranks; on a tensor
of the meta device the first two do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.collectives import broadcast, scatter
from dure.comm.functional import all_to_all_single, wait_tensor
from dure.comm.work import Work
from dure.errors import ShapeError
from dure.mesh import DeviceMesh

__all__ = ["mesh_broadcast", "mesh_scatter", "shard_dim_alltoall"]


def mesh_broadcast(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> Work | None:
    """Copy the tensor of one rank of an axis to the axis's other ranks.

    Args:
        tensor: The tensor to send or to write into.
        mesh: The mesh.
        mesh_dim: The axis.
        async_op: Return a `Work` while the collective runs.
        group_src: The sender's rank along the axis.
    """
    if tensor.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    return broadcast(tensor, group=group, async_op=async_op, group_src=group_src)


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> Work | None:
    """Send each rank of an axis one tensor of the list of one rank.

    Args:
        output: The tensor to write into.
        scatter_list: One tensor for each rank of the axis; only the sender's is read.
        mesh, mesh_dim, async_op, group_src: As for `mesh_broadcast`.
    """
    if output.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    sent = list(scatter_list) if group.rank() == group_src else None
    return scatter(output, sent, group=group, async_op=async_op, group_src=group_src)


def shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Return this rank's part of the full tensor along `shard_dim`, from parts along `gather_dim`.

    Raises:
        ShapeError: The axis's size does not divide `shard_dim`.
    """
    ranks = mesh.size(mesh_dim)
    if input.size(shard_dim) % ranks:
        raise ShapeError(
            "the dimension is not divisible by the number of ranks",
            op="shard_dim_alltoall",
            seen=f"dimension {shard_dim} of {list(input.shape)}, {ranks} ranks",
        )
    sent = torch.stack(input.chunk(ranks, shard_dim))
    if input.is_meta:
        return torch.cat(sent.unbind(), gather_dim)
    received = wait_tensor(all_to_all_single(sent, None, None, (mesh, mesh_dim)))
    return torch.cat(received.unbind(), gather_dim)
