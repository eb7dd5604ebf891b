"""The memory of tensors in messages.

Within a host the sender copies it once, into memory of its heap that belongs to the receiver from
then on (`give`). If the program has called `share`, it is not copied: both processes have the same
memory. Small memory is part of the message. Between hosts memory goes through sockets.
"""

from __future__ import annotations

import ctypes

import msgspec
import torch

from dure import native
from dure.comm.memory import tensor_of
from dure.errors import RpcError, UsageError
from dure.rpc.checks import check

__all__ = ["INLINE_BYTES", "MemoryRow", "bytes_of", "describe", "give", "own", "share", "take"]

INLINE_BYTES = 4096
"""Memory up to this size is part of the message."""

_MOST_TAKEN_BYTES = 1 << 30
"""The bytes of given memory that a process keeps; memory given beyond that is copied."""


class MemoryRow(msgspec.Struct, array_like=True, frozen=True):
    """The memory of tensors in a message: its bytes, or its address in the sender's heap.

    Args:
        data: The bytes, if it is small.
        offset: In the heap; -1 if it is not there.
        nbytes: Its size, unless `data` contains it.
        hold: The receiver's hold on shared memory (`native.heap_lend`).
    """

    data: bytes = b""
    offset: int = -1
    nbytes: int = 0
    hold: int = 0


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that is shared with the processes it is sent to.

    If it, or a view of it, is an argument or result of a call to a process of this host, that
    process gets the same memory and no copy: it reads what this one writes. Only calls and their
    answers order the accesses. Each process keeps the memory as long as it has tensors in it. A
    process of another host gets a copy, and so does a process to which a receiver passes it on.

    Args:
        tensor: A dense tensor of the CPU.

    Returns:
        A contiguous tensor of the same shape, dtype and values; `tensor` itself if it is shared.

    Raises:
        UsageError: `tensor` is not a dense tensor of the CPU, or shared memory is not supported
            here.
        RpcError: The host has no memory left.

    Cost:
        One copy of the tensor; to send it costs as much as a small argument.

    Example:
        ```python
        counts = rpc.share(torch.zeros(1000))
        rpc.rpc_sync(f"worker{1 - rank}", torch.Tensor.add_, (counts, 1))
        assert counts.sum() == 1000  # the callee has changed this memory
        ```
    """
    check(
        tensor,
        torch.Tensor,
        "the argument must be a tensor",
        op="share",
        fix="Share the tensors in it.",
    )
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(
            "only dense tensors of the CPU can be shared",
            op="share",
            seen=f"a tensor on {tensor.device} with the layout {tensor.layout}",
        )
    native.require("dure.rpc.share")
    if tensor.is_contiguous() and native.heap_lend(tensor.data_ptr(), None):
        return tensor
    memory = native.heap_share(tensor.nbytes)
    if memory is None:
        raise RpcError("the host has no memory left", op="share", seen=f"{tensor.nbytes:,} bytes")
    shared = tensor_of(memory, tuple(tensor.shape), tensor.dtype)
    shared.copy_(tensor.detach())
    return shared.requires_grad_(tensor.requires_grad)


def give(to: native.Process, memory: torch.Tensor) -> MemoryRow:
    """Return the row for memory that is sent to a process of this host."""
    address, count = memory.data_ptr(), memory.nbytes
    if hold := native.heap_lend(address, to):
        return MemoryRow(offset=native.heap_offset(address, count), nbytes=count, hold=hold)
    given = native.heap_give(count, to, address) if count > INLINE_BYTES else None
    if given is None:
        return MemoryRow(data=bytes_of(memory))
    return MemoryRow(offset=given.offset, nbytes=count)


def take(giver: native.Process, row: MemoryRow) -> torch.Tensor:
    """Return memory [bytes] that a process of this host has given or shared."""
    taken = native.heap_take(giver, row.offset, row.nbytes, row.hold)
    memory = torch.frombuffer(taken, dtype=torch.uint8)  # 7 us faster than a resizable one
    crowded = not row.hold and native.heap_taken() > _MOST_TAKEN_BYTES
    return memory.clone() if crowded else memory


def own(memory: torch.Tensor) -> torch.Tensor:
    """Return memory for a message of this process to itself: a copy, unless it is shared."""
    memory = memory.detach()
    return memory if native.heap_lend(memory.data_ptr(), None) else memory.clone()


def describe(memory: torch.Tensor) -> MemoryRow:
    """Return the row for memory that goes through a socket, by itself if it is not small."""
    count = memory.nbytes
    return MemoryRow(data=bytes_of(memory)) if count <= INLINE_BYTES else MemoryRow(nbytes=count)


def bytes_of(memory: torch.Tensor) -> bytes:
    """Return a copy of memory."""
    return ctypes.string_at(memory.data_ptr(), memory.nbytes) if memory.nbytes else b""
