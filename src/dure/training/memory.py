"""Where training allocates memory that other ranks see: here, and nowhere else.

Two kinds. *Own* memory is each rank's: the others look at it during a collective, which reduces it
where it lies (buckets of gradients). *Node-shared* memory is one for all ranks of a host: what one
writes the others read (shared parameters).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.comm.memory import host_shared_empty, shared_empty

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["node_shared_zeros", "own_zeros"]


def own_zeros(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate zeros [numel] of this rank's own, which collectives of `group` reduce in place.

    Collective: all ranks of the group, where it is shared memory (on the CPU).
    """
    if device.type == "cpu":
        return shared_empty(numel, dtype=dtype, group=group)
    return torch.zeros(numel, dtype=dtype, device=device)


def node_shared_zeros(group: ProcessGroup, num_bytes: int) -> torch.Tensor:
    """Allocate zeroed bytes [num_bytes] that are the same memory on all ranks of a host.

    Collective: all ranks of the group.

    Raises:
        UsageError: The group's backend has no memory that ranks share.
    """
    return host_shared_empty(num_bytes, dtype=torch.uint8, group=group)
