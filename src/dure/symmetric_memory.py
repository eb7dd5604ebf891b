"""Symmetric memory for CPU tensors, with the interface of `torch.distributed._symmetric_memory`.

`empty` allocates a tensor in memory that the other ranks of the host can map; `rendezvous`
exchanges the addresses. Its result returns each peer's memory as a tensor, and has signals and
barriers to coordinate reads and writes. Collectives use such tensors without copies, also without a
rendezvous.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path

import torch

from dure.comm import memory as heap
from dure.comm.group import ProcessGroup
from dure.comm.signals import Signals
from dure.comm.world import resolve
from dure.errors import ShapeError, UsageError

__all__ = ["SymmetricMemory", "empty", "is_symm_mem_tensor", "rendezvous", "trim"]

_CHANNELS = 16


def empty(
    *size: int | torch.Size | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Allocate an uninitialized tensor that the other ranks of this host can map.

    Other ranks need not call. The tensor is freed like any other.

    Args:
        *size: The shape, as for `torch.empty`.
        dtype: The dtype; None for torch's default.
        device: "cpu" or None.

    Returns:
        The tensor, in the symmetric heap of this process.

    Raises:
        UsageError: The device is not the CPU.
        CommError: The host has no memory left.

    Cost:
        The size is rounded up to pages of 4 KiB.

    Example:
        ```python
        from dure import symmetric_memory

        buffer = symmetric_memory.empty(4, dtype=torch.float32)
        assert buffer.shape == (4,)
        ```
    """
    if device is not None and torch.device(device).type != "cpu":
        raise UsageError(
            "symmetric memory is for CPU tensors",
            seen=f"device={device!r}",
            fix="On GPUs use torch.distributed._symmetric_memory.",
        )
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    sizes = (int(n) for n in shape)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    return heap.heap_empty(*sizes, dtype=dtype or torch.get_default_dtype())


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the symmetric heap of this process.

    Args:
        tensor: Any tensor.

    Returns:
        True for a tensor of `empty`, and for views of it.

    Example:
        ```python
        assert symmetric_memory.is_symm_mem_tensor(symmetric_memory.empty(4))
        assert not symmetric_memory.is_symm_mem_tensor(torch.empty(4))
        ```
    """
    return heap.heap_address(tensor) is not None


def trim() -> int:
    """Return the memory of freed tensors to the operating system.

    Returns:
        The number of bytes.

    Example:
        ```python
        buffer = None  # freed
        assert symmetric_memory.trim() >= 0
        ```
    """
    return heap.heap_trim()


def rendezvous(tensor: torch.Tensor, group: ProcessGroup | None = None) -> SymmetricMemory:
    """Exchange the addresses of the ranks' tensors.

    Args:
        tensor: A tensor from `empty` or `dure.shared_empty`, or a view of one; its complete storage
            is shared. Sizes may differ between ranks.
        group: Ranks that all run on this host; None for the default group.

    Returns:
        An object with each rank's memory, signals and barriers.

    Raises:
        UsageError: The tensor is not in the heap, or a rank runs on another host; raised on all
            ranks.

    Collective:
        All ranks of `group` call, in the same order relative to its other collectives.

    Cost:
        One all_gather of 64 bytes per rank, and one page per rank for signals.

    Example:
        ```python
        from dure import symmetric_memory

        tensor = symmetric_memory.empty(1024)
        memory = symmetric_memory.rendezvous(tensor)
        tensor.fill_(memory.rank)
        memory.barrier()
        peer = (memory.rank + 1) % memory.world_size
        assert memory.get_buffer(peer, (1024,), torch.float32)[0] == peer
        memory.barrier()
        ```
    """
    return SymmetricMemory(tensor, resolve(group, "rendezvous"))


@cache
def _host() -> int:
    """Return a number that differs between hosts, and between containers on a host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = Path("/proc/self/ns/pid").readlink()
    digest = hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


class SymmetricMemory(Signals):
    """The memory that the ranks of a group passed to `rendezvous`, and signals between the ranks.

    The object keeps this rank's tensor alive. A peer's memory belongs to the peer: reading it after
    the peer has freed its tensor returns undefined values.

    Attributes:
        rank: This rank's number in the group.
        world_size: Number of ranks of the group.
        buffer_size: Bytes of this rank's storage.
        signal_pad_size: Bytes of this rank's signals.

    Threads:
        See `Signals`.

    Obtained from:
        `rendezvous`.
    """

    def __init__(self, tensor: torch.Tensor, group: ProcessGroup) -> None:
        self._group, self._tensor = group, tensor
        self.rank, self.world_size = group.rank(), group.size()
        self.buffer_size = tensor.untyped_storage().nbytes()
        # One half for signals, one for barriers: [channel, rank that sets it].
        self._pad = heap.heap_empty(2, _CHANNELS, self.world_size, dtype=torch.int32, zeroed=True)
        self.signal_pad_size = self._pad.nbytes
        address, pad = heap.heap_address(tensor), heap.heap_address(self._pad)
        mine = [_host(), -1, 0, 0, 0, 0, 0, tensor.storage_offset() * tensor.element_size()]
        if address is not None and pad is not None:
            mine[1:7] = [*address, pad[3], self.buffer_size]
        table = torch.empty(self.world_size * len(mine), dtype=torch.int64, device="cpu")
        group.all_gather_single(table, torch.tensor(mine, dtype=torch.int64, device="cpu"))
        places: list[list[int]] = table.view(self.world_size, -1).tolist()
        self._check(places)
        peers = [self._process(r, place) for r, place in enumerate(places)]
        self._offsets = [place[7] for place in places]
        self._buffers = [
            peer.memory(place[4], place[6]) for peer, place in zip(peers, places, strict=True)
        ]
        pads = [
            peer.memory(place[5], self.signal_pad_size)
            for peer, place in zip(peers, places, strict=True)
        ]
        super().__init__(group, peers, pads, _CHANNELS)

    def _check(self, places: list[list[int]]) -> None:
        hosts = [place[0] for place in places]
        away = [r for r, host in enumerate(hosts) if host != hosts[0]]
        outside = [r for r, place in enumerate(places) if place[1] < 0]
        if away:
            seen = f"rank 0 and ranks {away} are on different hosts"
            fix = "Make a group of the ranks of one host, and pass it as group=."
        elif outside:
            seen = f"the tensors of ranks {outside} are not in the symmetric heap"
            fix = "Allocate them with dure.symmetric_memory.empty()."
        else:
            return
        raise UsageError(
            "these tensors cannot be shared",
            op="rendezvous",
            group=self._group.group_name,
            rank=self.rank,
            world_size=self.world_size,
            seen=seen,
            fix=fix,
        )

    def _process(self, rank: int, place: list[int]) -> heap.Process:
        process = heap.process_of(place[1], place[2], place[3])
        if process is None:
            raise self._lost(rank, place[1], "")
        return process

    def __repr__(self) -> str:
        return (
            f"SymmetricMemory(rank {self.rank} of {self.world_size}, {self.buffer_size:,} bytes, "
            f"group {self._group.group_name!r})"
        )

    # ---------------------------------------------------------------- memory

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Return memory of a rank's storage as a tensor.

        Args:
            rank: A rank of the group, possibly this one.
            sizes: Shape of the result, which is contiguous.
            dtype: Dtype of the result.
            storage_offset: Number of elements of `dtype` to skip.

        Returns:
            A tensor in the rank's memory; writes to it are visible to that rank.

        Raises:
            ShapeError: The storage is too short.
            UsageError: The group has no such rank.
        """
        memory = self._buffers[self._rank_of(rank)]
        nbytes = math.prod(sizes) * dtype.itemsize
        start = storage_offset * dtype.itemsize
        if storage_offset < 0 or start + nbytes > len(memory):
            raise ShapeError(
                f"the storage of rank {rank} is too short",
                op="get_buffer",
                group=self._group.group_name,
                seen=f"{tuple(sizes)} of {dtype} from element {storage_offset} on need "
                f"{start + nbytes:,} bytes, it has {len(memory):,}",
            )
        storage = heap.tensor_of(memory, (len(memory),), torch.uint8)
        return storage[start : start + nbytes].view(dtype).view(sizes)

    def get_remote_tensor(
        self, peer: int, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a peer's memory from the start of the tensor that it passed to `rendezvous`.

        Args:
            peer: A rank of the group.
            sizes: Shape of the result, which is contiguous.
            dtype: Dtype of the result.

        Returns:
            A tensor in the peer's memory.

        Raises:
            ShapeError: The storage is too short, or the peer's tensor does not start at a multiple
                of the dtype's size.
            UsageError: The group has no such rank.
        """
        offset, rest = divmod(self._offsets[self._rank_of(peer)], dtype.itemsize)
        if rest:
            raise ShapeError(
                f"the tensor of rank {peer} does not begin at an element of {dtype}",
                op="get_remote_tensor",
                group=self._group.group_name,
            )
        return self.get_buffer(peer, sizes, dtype, offset)

    def get_signal_pad(
        self,
        rank: int,
        sizes: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """Return the memory of a rank's signals as a tensor.

        Args:
            rank: A rank of the group.
            sizes: Shape of the result; () for all memory from `storage_offset` on.
            dtype: Dtype of the result; None for int32.
            storage_offset: Number of elements of `dtype` to skip.

        Returns:
            A tensor in the rank's memory.

        Raises:
            UsageError: The group has no such rank.
        """
        dtype = dtype or torch.int32
        memory = self._pads[self._rank_of(rank)]
        pad = heap.tensor_of(memory, (len(memory) // dtype.itemsize,), dtype)[storage_offset:]
        return pad[: math.prod(sizes)].view(sizes) if sizes else pad
