"""Tensors in the symmetric heap: memory of this process that the other ranks of the host reach.

The note "Symmetric heap" (csrc/core/symmetric_heap.h) describes the heap, and why its tensors need
no copy through staging. This module turns its pieces into tensors.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import TYPE_CHECKING

import torch

from dure import native
from dure.comm.capture import in_fake_mode
from dure.comm.world import resolve
from dure.errors import CommError, ForkWarning, UsageError
from dure.native import HeapMemory, Process

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

HeapAddress = tuple[int, int, int, int]
"""Where a peer finds memory: pid, start time and heap descriptor of its owner, offset in bytes."""
change_word = native.change_word
"""Wait until a 32-bit word has one value, and give it another (`native.change_word`)."""

NO_MEMORY_FIX = "Free memory, or raise the limits of the process (`ulimit -f -v`) or the container."
_HAS_HEAP = native.available()[0]
_PLACEHOLDER_BYTES = 56
"""The length of a storage that is made to be put over other memory."""


def storage_of(memory: HeapMemory) -> torch.UntypedStorage:
    """Return a storage over `memory`, which holds it until it is resized or freed.

    It can be resized as any other: `resize_(0)` frees the memory in the heap, and what follows is
    ordinary memory.
    """
    storage = torch.UntypedStorage(_PLACEHOLDER_BYTES, device="cpu")
    where = storage._cdata, storage.data_ptr()  # pyright: ignore[reportPrivateUsage]
    if native.put_into_storage(memory, *where, _PLACEHOLDER_BYTES):
        return storage
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def tensor_of(memory: HeapMemory, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return `memory` as a tensor [shape], which holds it."""
    if len(memory) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = storage_of(memory)
    # Not a view: autograd does not allow in-place changes of views that a Function returned.
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]


def heap_empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    zeroed: bool = False,
    copied: bool = False,
    must: bool = True,
) -> torch.Tensor:
    """Allocate a tensor in this process's symmetric heap; other ranks need not call.

    Collectives of every group whose ranks share the host find it by its address, and read and write
    it in place. It is freed like any tensor, and its memory is reused. Without an engine, and
    within `FakeTensorMode`, it is an ordinary tensor.

    Args:
        *shape: Of the tensor, which is contiguous and on the CPU.
        dtype: Of the tensor.
        zeroed: Whether it is filled with zeros.
        copied: Whether forked children get a copy, as of ordinary memory; see the note "Forked
            children" (csrc/core/forking.h). Otherwise they see later writes to it.
        must: Whether it must be in the heap; otherwise it is an ordinary tensor if it does not fit.

    Cost:
        Its size is rounded up to pages. Some 2 us if freed memory of the heap is reused; else 0.2
        to 0.3 us for each page of 4 KiB, which the system allocates and clears.

    Raises:
        CommError: It does not fit, even after freed memory was returned to the system.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    in_heap = _HAS_HEAP and nbytes > 0 and not in_fake_mode()
    memory = native.heap_allocate(nbytes, zeroed, copied) if in_heap else None
    if memory is None and not (in_heap and must):
        return (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device="cpu")
    if memory is None:
        used, kept, pieces = native.heap_usage()
        raise CommError(
            "this rank could not allocate shared memory",
            op="shared_empty",
            seen=f"requested: {nbytes:,} bytes; the symmetric heap holds {used:,} bytes in "
            f"{pieces} tensors, and keeps {kept:,} bytes for new ones",
            fix=NO_MEMORY_FIX,
        )
    return tensor_of(memory, shape, dtype)


def heap_address(tensor: torch.Tensor) -> HeapAddress | None:
    """Return the address of `tensor`'s storage for peers; None if it is not in the heap."""
    storage = tensor.untyped_storage()
    if not _HAS_HEAP or tensor.device.type != "cpu" or storage.nbytes() == 0:
        return None
    offset = native.heap_offset(storage.data_ptr(), storage.nbytes())
    return None if offset < 0 else (*native.heap_identity(), offset)


def process_of(pid: int, start_time: int, descriptor: int) -> Process | None:
    """Map the heap of a process of this host; None if it has ended.

    Raises:
        CommError: The system does not let this process map it.
    """
    try:
        return native.heap_peer(pid, start_time, descriptor)
    except OSError as error:
        raise CommError(
            f"the memory of process {pid} cannot be reached",
            seen=str(error),
            fix="Run all ranks on one host, in one container, as one user.",
        ) from None


def heap_trim() -> int:
    """Return the memory of freed tensors, which the heap keeps for new ones, to the system.

    Returns:
        The number of bytes.
    """
    return native.heap_trim() if _HAS_HEAP else 0


def shared_empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Allocate a zeroed tensor that the ranks of a host reduce in place, without staging.

    Each rank gets its own tensor, in its symmetric heap; collectives of any group of ranks of this
    host use it without copies. If the backend has no shared memory, or the heap is full (`ulimit
    -f` and `-v` limit it), it is an ordinary tensor, and everything still works. Other ranks need
    not call, and may free in another order.

    Args:
        *shape: Of the tensor.
        dtype: Of the tensor.
        group: The group whose backend decides whether there is shared memory.

    Returns:
        The tensor.

    Cost:
        Some 2 us if freed memory is reused; else 0.2 to 0.3 us for each page of 4 KiB.

    Example:
        ```python
        buffer = dist.shared_empty(1024)
        buffer.fill_(dist.get_rank())
        dist.all_reduce(buffer)                              # reads the peers' tensors in place
        assert buffer[0] == sum(range(dist.get_world_size()))
        ```
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = resolve(group, "shared_empty").allocate("shared_empty", nbytes, False)
    if memory is None:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return memory.view(dtype).view(shape)


def host_shared_empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Allocate a zeroed tensor that is the same memory on all ranks of a host.

    The other ranks of the host read the values that one rank writes: the tensor exists once per
    host, not once per rank. Call `barrier` between writing and reading: otherwise a reader may see
    partly written values. Collectives treat it as equal tensors of the ranks: a broadcast on one
    host finds the values in place, a sum counts them once per rank. Collectives with a different
    result on each rank (scatter, all_to_all) must not be used on it.

    Args:
        *shape: Of the tensor.
        dtype: Of the tensor.
        group: The ranks that share it; over several hosts, each host has its own tensor.

    Returns:
        The tensor.

    Collective:
        All ranks call with the same shape and dtype, in the same order. A rank that does not makes
        the others raise `CommTimeout` or `Desync`.

    Cost:
        One barrier; the memory of one tensor per host, in the heap of the host's first rank. It is
        freed when the last rank releases its tensor, or has died.

    Raises:
        UsageError: The backend has no memory that ranks share (gloo, nccl, mpi).
        CommError: The host has no memory left; the same on all ranks.

    Example:
        ```python
        table = dist.host_shared_empty(4)                    # one copy per host
        if dist.get_rank() == 0:                             # on several hosts: one rank of each
            table.copy_(torch.arange(4.0))
        dist.barrier()
        assert table.tolist() == [0.0, 1.0, 2.0, 3.0]
        ```
    """
    op, pg = "host_shared_empty", resolve(group, "host_shared_empty")
    memory = pg.allocate(op, math.prod(shape) * dtype.itemsize, True)
    if memory is None:
        raise UsageError(
            "the ranks of this group share no memory",
            op=op,
            group=pg.group_name,
            rank=pg.rank(),
            world_size=pg.size(),
            seen=f"ranks of the backend {pg.backend_name} only exchange messages",
            fix='Use the backend "shm" on one host, or "hybrid" on several.',
        )
    return memory.view(dtype).view(shape)


def _warn_before_fork() -> None:
    """Warn, once, of results that are more than a fork copies."""
    global _has_warned
    not_copied = native.not_copied_in_children()
    if _has_warned or not not_copied:
        return
    _has_warned = True
    warnings.warn(
        f"this process forks while it has {not_copied:,} bytes of results, which are more than a "
        "fork copies: if it writes or frees these, they change in the child too. Clone tensors "
        "that a child needs, or start children by 'spawn' or 'forkserver'.",
        ForkWarning,
        stacklevel=2,
    )


_has_warned = False
if _HAS_HEAP:
    os.register_at_fork(before=_warn_before_fork)
