"""Where training allocates memory that other ranks see: here, and nowhere else.

Two kinds. *Own* memory is each rank's: the others look at it during a collective, which reduces it
in place (buckets of gradients). *Node-shared* memory is one for all ranks of a host: each reads
the writes of the others (shared parameters).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from dure.comm.memory import host_shared_empty, shared_empty

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "give_back_freed",
    "give_back_pages",
    "node_shared_zeros",
    "own_zeros",
    "piece_of",
    "side_by_side",
]

_ALIGNMENT = 64
_LIBC = ctypes.CDLL(None, use_errno=True)


def own_zeros(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate zeros [numel] of this rank's own, which collectives of `group` reduce in place.

    Collective:
        All ranks of the group, where it is shared memory (on the CPU).
    """
    if device.type == "cpu":
        return shared_empty(numel, dtype=dtype, group=group)
    return torch.zeros(numel, dtype=dtype, device=device)


def node_shared_zeros(group: ProcessGroup, num_bytes: int) -> torch.Tensor:
    """Allocate zeroed bytes [num_bytes] that are the same memory on all ranks of a host.

    Collective:
        All ranks of the group.

    Raises:
        UsageError: The group's backend has no memory that ranks share.
    """
    return host_shared_empty(num_bytes, dtype=torch.uint8, group=group)


def side_by_side(nbytes: Iterable[int]) -> list[int]:
    """Return where pieces of so many bytes begin, one after another; last, where the memory ends.

    They begin at addresses that the fastest instructions like.
    """
    return list(accumulate((-(-n // _ALIGNMENT) * _ALIGNMENT for n in nbytes), initial=0))


def piece_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over some bytes of `memory`, of its own, and no longer than they are."""
    if not nbytes:
        return torch.UntypedStorage(0)
    piece = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=nbytes, offset=start)
    return piece.untyped_storage()


def give_back_pages(tensor: torch.Tensor) -> int:
    """Give the system the pages that lie wholly in a tensor. Its values are lost, not its address.

    Where ranks share the pages, they are gone for all.

    Args:
        tensor: Contiguous, on the CPU.

    Returns:
        How many bytes; 0 where the system does not do so.
    """
    if sys.platform != "linux":
        return 0
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0:
        return 0
    where, size = ctypes.c_void_p(first), ctypes.c_size_t(length)
    # Shared memory has to be taken out of its file; private memory has none.
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):
        if _LIBC.madvise(where, size, advice) == 0:
            return length
    return 0


def give_back_freed() -> None:
    """Have the C library return freed memory to the system: it keeps what lies between the used."""
    trim = getattr(_LIBC, "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
