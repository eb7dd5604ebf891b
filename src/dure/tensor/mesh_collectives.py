"""Collectives along one axis of a mesh, under the names of torch's DTensor.

Each is a collective of the axis's ranks. On the meta device the first two do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.collectives import broadcast, scatter
from dure.comm.functional import all_to_all_single, wait_tensor
from dure.comm.work import Work
from dure.mesh import DeviceMesh
from dure.tensor.placement_types import Shard, unpad_tensor

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

    If the axis's size does not divide `shard_dim`, the last ranks have shorter parts, or empty
    ones; short parts are sent with zeros after their end.
    """
    parts, pads = Shard(shard_dim)._split_tensor(input, mesh.size(mesh_dim))  # pyright: ignore[reportPrivateUsage]
    received = torch.stack(parts)
    if not input.is_meta:
        received = wait_tensor(all_to_all_single(received, None, None, (mesh, mesh_dim)))
    full = torch.cat(received.unbind(), gather_dim)
    return unpad_tensor(full, shard_dim, pads[mesh.get_local_rank(mesh_dim)]).contiguous()
