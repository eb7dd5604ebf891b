"""Tensors in memory that the ranks of a host share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.comm.world import resolve

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["shared_empty"]


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
