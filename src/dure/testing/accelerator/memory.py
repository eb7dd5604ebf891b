"""Memory of the simulated device: apart from the host's, and worthless once it is freed.

A tensor's storage has an address at which no process has memory, so host code that follows it ends
by a segmentation fault. The values are in host memory that only work in streams touches: `on_host`.

New memory holds garbage: NaN, or -1. Freed memory is overwritten with it when the stream that had
allocated it allocates again, as if it were given to that tensor. So work of another stream that
still reads it, and was not named by `record_stream` or waited for, reads garbage.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dure import torch_private
from dure.testing.accelerator.streams import Stream, current_stream

__all__ = [
    "NAME",
    "Backing",
    "backing_of",
    "empty",
    "fill_garbage",
    "is_on_device",
    "loaded",
    "on_host",
]

NAME = "sim"
"""The device's type."""
_GARBAGE = 0xFF
"""Of each byte: NaN in a float, -1 in an integer."""
_FIRST_ADDRESS = 1 << 60
_ALIGNMENT = 512
_cpu: Any = torch_private.DispatchKeySet(torch_private.DispatchKey.CPU)
_create_empty: Any = torch_private.later("torch._C._acc.create_empty_tensor")
_set: Any = torch.ops.aten.set_.source_Storage_storage_offset
_addresses = itertools.count(_FIRST_ADDRESS, 1 << 40)


class _HostBlock:
    """Memory of one allocation.

    Attributes:
        values: The host memory that has them.
        stream: In which it was allocated.
        used_in: Other streams, from `record_stream`.
    """

    def __init__(self, nbytes: int) -> None:
        self.values: Any = torch.UntypedStorage(nbytes)
        self.values.fill_(_GARBAGE)
        self.stream, self.used_in = current_stream(), set[Stream]()
        self.stream.allocate()

    def __del__(self) -> None:
        values = self.values
        self.stream.free(lambda: values.fill_(_GARBAGE), self.used_in)


_backings: weakref.WeakValueDictionary[int, Backing] = weakref.WeakValueDictionary()
"""By address: torch's C++ makes other storages of an address, as to write a file."""


class Backing:
    """What a storage on the device has in place of host memory.

    Its methods take the place of the storage's: torch asks for a class without subclasses.
    """

    def __init__(self, nbytes: int) -> None:
        self.block = _HostBlock(nbytes)

    def install(self, storage: Any) -> None:
        """Become the memory of `storage`."""
        storage.backing = self
        _backings[storage.data_ptr()] = self
        for name in ("resize_", "nbytes", "clone", "cpu"):
            setattr(storage, name, getattr(self, name))
        storage.size = self.nbytes

    @property
    def host_bytes(self) -> torch.Tensor:
        """The values, for work in streams."""
        host = torch.empty(0, dtype=torch.uint8, device="cpu")
        return host.set_(self.block.values)  # pyright: ignore

    def nbytes(self) -> int:
        """Return how many bytes it has now."""
        return self.block.values.nbytes()

    def resize_(self, size: int) -> None:
        """Free the memory, and allocate other memory with the values that fit."""
        kept = min(size, self.nbytes())
        if size != self.nbytes():
            old, self.block = self.host_bytes, _HostBlock(size)
            new = self.host_bytes
            if kept:
                current_stream().add(lambda: new[:kept].copy_(old[:kept]))

    def clone(self) -> torch.UntypedStorage:
        """Copy it within the device."""
        made = empty([self.nbytes()], [1], torch.uint8)
        there, here = on_host(made), self.host_bytes
        current_stream().add(lambda: there.copy_(here))
        return made.untyped_storage()

    def cpu(self) -> torch.UntypedStorage:
        """Copy it to the host, which waits."""
        current_stream().synchronize()
        return self.block.values.clone()


def loaded(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Copy to the device what `torch.load` has read, if it was saved from there."""
    if location.partition(":")[0] != NAME:
        return None
    made = empty([storage.nbytes()], [1], torch.uint8)
    backing_of(made).block.values = storage.clone()
    return made.untyped_storage()


def is_on_device(value: object) -> bool:
    """Return whether a value is a tensor on the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor on the device, in the current stream."""
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = 0 if 0 in size else (last + 1) * dtype.itemsize
    where = next(_addresses)
    storage: Any = torch_private.construct_storage(where, torch.device(NAME, 0), nbytes)
    Backing(nbytes).install(storage)
    tensor = _create_empty((0,), dtype)
    return _set.redispatch(_cpu, tensor, storage, 0, [*size], [*stride])


def backing_of(tensor: torch.Tensor) -> Backing:
    """Return the memory of a tensor on the device."""
    storage: Any = tensor.untyped_storage()
    found = getattr(storage, "backing", None)
    return _backings[storage.data_ptr()] if found is None else found


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU over the memory that has the values of one on the device."""
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    values = backing_of(tensor).block.values
    view.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore
    if tensor.is_conj():
        view = view.conj()
    return torch_private.neg_view(view) if tensor.is_neg() else view


def fill_garbage(tensor: torch.Tensor) -> None:
    """Overwrite the bytes of a tensor on the CPU."""
    width = tensor.itemsize
    strides = [*(stride * width for stride in tensor.stride()), 1]
    values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(  # pyright: ignore
        tensor.untyped_storage(), tensor.storage_offset() * width, [*tensor.size(), width], strides
    )
    values.fill_(_GARBAGE)
