"""The memory of tensors, as it goes from one process to another.

Within a host it is copied once, by the sender, into memory of its heap that is the receiver's alone
from then on (`give`); or, if the program has said so (`share`), it is not copied at all: then both
have the same. Small memory travels inline. Between hosts it goes through sockets, as raw bytes.
"""

from __future__ import annotations

import ctypes

import msgspec
import torch

from dure import native
from dure.comm.memory import note_shown, shown_to_children, tensor_of
from dure.errors import RpcError, UsageError
from dure.rpc.checks import check

__all__ = ["INLINE_BYTES", "Memory", "bytes_of", "describe", "give", "own", "share", "take"]

INLINE_BYTES = 4096
"""Memory up to this size travels in the envelope."""

_MOST_TAKEN_BYTES = 1 << 30
"""How much memory that others have given a process keeps; what comes then is copied."""


class Memory(msgspec.Struct, array_like=True, frozen=True):
    """The memory of some tensors: inline, or where it lies in the sender's heap.

    Args:
        data: Inline.
        offset: Of the heap; -1: it is inline, or comes by itself.
        nbytes: How long it is, if it is not inline.
        hold: By what the receiver holds memory that is shared (`native.heap_lend`).
    """

    data: bytes = b""
    offset: int = -1
    nbytes: int = 0
    hold: int = 0


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that is passed to other processes of this host itself.

    Wherever it, or a view of it, is an argument or a result, the process that gets it has the same
    memory, and no copy: what one writes the other reads. Nothing orders what they do but calls and
    their answers. Each has it as long as it has tensors in it, whatever becomes of the others. What
    goes to another host is a copy, and so is what another process passes on.

    Args:
        tensor: On the CPU, dense.

    Returns:
        A contiguous tensor of the same shape, dtype and values; `tensor`, if it is shared already.

    Raises:
        UsageError: It is no such tensor, or there is no shared memory here.
        RpcError: The host has no memory left.

    Cost:
        One copy, of this tensor; passing it costs as much as a small argument.
    """
    check(tensor, torch.Tensor, "only tensors can be shared", op="share", fix="Share those in it.")
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
    shared = shown_to_children(tensor_of(memory, tuple(tensor.shape), tensor.dtype))
    shared.copy_(tensor.detach())
    return shared.requires_grad_(tensor.requires_grad)


def give(to: native.Process, memory: torch.Tensor) -> Memory:
    """Return what stands for memory that goes to a process of this host."""
    address, count = memory.data_ptr(), memory.nbytes
    if hold := native.heap_lend(address, to):
        return Memory(offset=native.heap_offset(address, count), nbytes=count, hold=hold)
    given = native.heap_give(count, to, address) if count > INLINE_BYTES else None
    if given is None:
        return Memory(data=bytes_of(memory))
    return Memory(offset=given.offset, nbytes=count)


def take(giver: native.Process, row: Memory) -> torch.Tensor:
    """Return memory [bytes] that a process of this host has given or shared."""
    taken = native.heap_take(giver, row.offset, row.nbytes, row.hold)
    memory = torch.frombuffer(taken, dtype=torch.uint8)  # 7 us less than what can be resized
    if row.hold:
        note_shown(memory)
        return memory
    crowded = native.heap_taken() > _MOST_TAKEN_BYTES
    return memory.clone() if crowded else memory


def own(memory: torch.Tensor) -> torch.Tensor:
    """Return what stands for memory in a message of this process to itself."""
    memory = memory.detach()
    return memory if native.heap_lend(memory.data_ptr(), None) else memory.clone()


def describe(memory: torch.Tensor) -> Memory:
    """Return what stands for memory that goes through a socket; beside it, if it is not small."""
    count = memory.nbytes
    return Memory(data=bytes_of(memory)) if count <= INLINE_BYTES else Memory(nbytes=count)


def bytes_of(memory: torch.Tensor) -> bytes:
    """Return a copy of memory."""
    return ctypes.string_at(memory.data_ptr(), memory.nbytes) if memory.nbytes else b""
