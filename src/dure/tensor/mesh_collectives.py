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

    Returns:
        None when the tensor is in place; with `async_op` a `Work`.

    Collective:
        All ranks of the axis.

    Example:
        ```python
        from dure.tensor import _collective_utils as mesh_collectives

        mesh = dist.init_device_mesh("cpu", (2,))
        x = torch.tensor([float(dist.get_rank())])
        mesh_collectives.mesh_broadcast(x, mesh, group_src=1)
        assert x.item() == 1.0
        ```
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

    Returns:
        As `mesh_broadcast`.

    Collective:
        All ranks of the axis.

    Example:
        ```python
        x = torch.empty(1)
        mesh_collectives.mesh_scatter(x, [torch.tensor([1.0]), torch.tensor([2.0])], mesh)
        assert x.item() == dist.get_rank() + 1
        ```
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

    Args:
        input: This rank's part along `gather_dim`.
        gather_dim: The dimension that is sharded before.
        shard_dim: The dimension that is sharded after.
        mesh: The mesh.
        mesh_dim: The axis.

    Returns:
        A new tensor.

    Collective:
        All ranks of the axis.

    Example:
        ```python
        row = torch.tensor([[1.0, 2.0]]) + 2 * dist.get_rank()  # of [[1, 2], [3, 4]]
        column = mesh_collectives.shard_dim_alltoall(row, 0, 1, mesh, 0)
        assert column.flatten().tolist() == ([1.0, 3.0] if dist.get_rank() == 0 else [2.0, 4.0])
        ```
    """
    parts, pads = Shard(shard_dim)._split_tensor(input, mesh.size(mesh_dim))  # pyright: ignore[reportPrivateUsage]
    received = torch.stack(parts)
    if not input.is_meta:
        received = wait_tensor(all_to_all_single(received, None, None, (mesh, mesh_dim)))
    full = torch.cat(received.unbind(), gather_dim)
    return unpad_tensor(full, shard_dim, pads[mesh.get_local_rank(mesh_dim)]).contiguous()
