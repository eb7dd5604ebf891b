"""Tensors in memory that the ranks of a host share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.comm.world import resolve

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["host_shared_empty", "shared_empty"]


def shared_empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Allocate a zeroed tensor that the group's ranks reduce where it lies, without staging.

    Each rank gets a tensor of its own; only collectives of this group look at the others'. Where
    the backend has no shared memory, it is an ordinary tensor, and everything still works.

    Args:
        *shape: Of the tensor.
        dtype: Of the tensor.
        group: The ranks that share.

    Collective:
        All ranks call with the same shape and dtype, in the same order. A rank that does not makes
        the others raise `CommTimeout` or `Desync`.

    Cost:
        One system call and one meeting; the memory is n times the tensor, on the host in all. It
        is given back when the last rank lets go of its tensor.
    """
    return resolve(group, "shared_empty").shared_empty(*shape, dtype=dtype)


def host_shared_empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Allocate a zeroed tensor that is the same memory on all ranks of a host.

    What one rank writes, the others of its host read: the tensor exists once a host, not once a
    rank. Nothing keeps a reader from seeing a value half written; put a `barrier` between writing
    and reading. Collectives take it for equal tensors of the ranks: a broadcast on one host finds
    the values in place, a sum counts them once a rank. Those that leave a different result on each
    rank (scatter, all_to_all) have no meaning on it.

    Args:
        *shape: Of the tensor.
        dtype: Of the tensor.
        group: The ranks that share; over several hosts, each host has a tensor of its own.

    Collective:
        All ranks call with the same shape and dtype, in the same order. A rank that does not makes
        the others raise `CommTimeout` or `Desync`.

    Cost:
        One system call and one meeting; the memory of one tensor a host. It is given back when the
        last rank lets go of its tensor.

    Raises:
        UsageError: The backend has no memory that ranks share (gloo, nccl, mpi).
    """
    return resolve(group, "host_shared_empty").host_shared_empty(*shape, dtype=dtype)
