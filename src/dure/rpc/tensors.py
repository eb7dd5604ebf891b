"""The table of tensors in a message, and the memory that travels beside it.

Each row describes a tensor: dtype, shape, strides, and its offset in one of the message's memories.
A storage is sent once per message, however many tensors are views of it, and only the part that
they cover. So tensors that share memory at the sender share it at the receiver.

A sparse tensor (COO) is its indices and its values, which are checked when it is rebuilt; a tensor
of the meta device has no memory. Tensors of other devices are copied through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from dure import native
from dure.comm.codes import dtype_code, dtype_name

__all__ = ["TensorRow", "TensorTable", "describe_dense", "is_dense", "rebuild"]

_ALIGNMENT = 64
"""The part of a storage that is sent starts at a multiple of this: valid for every dtype."""


class TensorRow(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of a message."""

    memory: int  # index into the message's memories; -1: it has none of its own
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, within the memory
    requires_grad: bool = False
    parameter: bool = False
    device: str = "cpu"  # at the receiver
    sparse: bool = False  # the two rows before this one are its indices and its values
    coalesced: bool = False


class TensorTable:
    """Collects the tensors of one message.

    Args:
        device_there: Returns the receiver's device for a tensor's device here. If None, only
            tensors of the CPU are accepted.

    Attributes:
        sources: The tensors themselves.
    """

    def __init__(self, device_there: Callable[[torch.device], str] | None) -> None:
        self.sources: list[torch.Tensor] = []
        self._rows: list[TensorRow] = []
        self._device_there = device_there
        self._numbers: dict[int, int] = {}  # index of each storage
        self._storages: list[torch.UntypedStorage] = []
        self._covered: list[tuple[int, int]] = []  # first byte and end, per storage

    def add(self, tensor: torch.Tensor) -> int | None:
        """Add a tensor and return its row; None if it must be pickled as torch does it.

        Raises:
            ValueError: The tensor is on a device without a device map.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if tensor.layout is torch.sparse_coo:
            self._add_sparse(tensor)
        elif tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested):
            self._add_strided(tensor)
        else:
            return None
        return len(self._rows) - 1

    def finish(self) -> tuple[tuple[TensorRow, ...], tuple[torch.Tensor, ...]]:
        """Return the rows and the memories (uint8 [bytes]), cut to what the tensors cover."""
        begins: list[int] = []
        memories: list[torch.Tensor] = []
        for storage, (first, end) in zip(self._storages, self._covered, strict=True):
            begin = min(first, end) // _ALIGNMENT * _ALIGNMENT
            begins.append(begin)
            covered = torch.empty(0, dtype=torch.uint8, device="cpu")
            covered.set_(storage, begin, (end - begin,))  # pyright: ignore[reportCallIssue]
            memories.append(covered)
        rows = self._rows
        for number, row in enumerate(rows):
            if row.memory < 0:
                continue
            before = begins[row.memory] // getattr(torch, row.dtype).itemsize
            offset = row.offset - before if 0 not in row.shape else 0
            rows[number] = msgspec.structs.replace(row, offset=offset)
        return tuple(rows), tuple(memories)

    def _add_strided(self, tensor: torch.Tensor) -> None:
        device = tensor.device.type
        plain = tensor.detach()
        if device == "meta":
            self._append(tensor, plain, -1, device)
            return
        if device != "cpu":
            if self._device_there is None:
                raise ValueError(f"a tensor on {tensor.device}, for which there is no device map")
            device, plain = self._device_there(tensor.device), plain.cpu()
        plain = plain.resolve_conj().resolve_neg()
        storage, size = plain.untyped_storage(), plain.itemsize
        identity = storage._cdata  # pyright: ignore[reportPrivateUsage]: unique per storage
        number = self._numbers.setdefault(identity, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
            self._covered.append((storage.nbytes(), 0))
        if plain.numel():
            first = int(plain.storage_offset())
            spread = zip(plain.shape, plain.stride(), strict=True)
            last = first + sum(s * (n - 1) for n, s in spread)
            begin, end = self._covered[number]
            self._covered[number] = min(begin, first * size), max(end, (last + 1) * size)
        self._append(tensor, plain, number, device)

    def _append(self, tensor: torch.Tensor, plain: torch.Tensor, memory: int, device: str) -> None:
        row = TensorRow(
            memory=memory,
            dtype=dtype_name(dtype_code(plain.dtype)),
            shape=tuple(plain.shape),
            stride=plain.stride(),
            offset=int(plain.storage_offset()),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            device=device,
        )
        self._rows.append(row)
        self.sources.append(tensor)

    def _add_sparse(self, tensor: torch.Tensor) -> None:
        plain = tensor.detach()
        self._add_strided(plain._indices())
        self._add_strided(plain._values())
        row = TensorRow(
            memory=-1,
            dtype=self._rows[-1].dtype,
            shape=tuple(plain.shape),
            stride=(),
            offset=0,
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            device=self._rows[-1].device,
            sparse=True,
            coalesced=plain.is_coalesced(),
        )
        self._rows.append(row)
        self.sources.append(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory of this host in the order of its elements, and nothing else."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def describe_dense(tensor: torch.Tensor) -> TensorRow:
    """Return the row of a dense tensor that is itself the message's only memory."""
    return TensorRow(
        memory=0,
        dtype=dtype_name(dtype_code(tensor.dtype)),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=0,
        requires_grad=tensor.requires_grad,
    )


def rebuild(
    rows: Sequence[TensorRow], inline: bytes, memories: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Make the tensors of a message from the memories (uint8 [bytes]) that came with it.

    The tensors share the memories.

    Args:
        rows: The table.
        inline: The only tensor, if the engine packed it (`native.pack_tensor`).
        memories: Of the message.

    Raises:
        ValueError: A tensor does not fit its memory.
        RuntimeError: A sparse tensor has indices outside of its shape, or invalid ones.
    """
    if inline:
        tensor = native.unpack_tensor(inline)
        return [tensor.requires_grad_() if inline[0] else tensor]
    made: list[torch.Tensor] = []
    for row in rows:
        tensor = _rebuild_sparse(row, *made[-2:]) if row.sparse else _rebuild_strided(row, memories)
        if row.parameter:
            made.append(torch.nn.Parameter(tensor, requires_grad=row.requires_grad))
        else:
            made.append(tensor.requires_grad_(row.requires_grad))
    return made


def _rebuild_sparse(row: TensorRow, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices.clone(),  # other tensors may share that memory, and change what was checked
        values,
        row.shape,
        device=values.device,
        is_coalesced=row.coalesced,
        check_invariants=True,
    )


def _rebuild_strided(row: TensorRow, memories: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, row.dtype)
    if not isinstance(dtype, torch.dtype) or len(row.shape) != len(row.stride):
        raise ValueError(f"invalid tensor in a message: {row}")
    if row.device == "meta":
        return torch.empty_strided(row.shape, row.stride, dtype=dtype, device="meta")
    memory = memories[row.memory]
    last = row.offset + sum(s * (n - 1) for n, s in zip(row.shape, row.stride, strict=True))
    inside = min((row.offset, *row.shape, *row.stride)) >= 0
    if not inside or (0 not in row.shape and (last + 1) * dtype.itemsize > memory.nbytes):
        raise ValueError(f"a tensor is larger than its memory: {row}")
    storage, begin = memory.untyped_storage(), int(memory.storage_offset()) * memory.itemsize
    offset = begin // dtype.itemsize + row.offset
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, offset, row.shape, row.stride)  # pyright: ignore[reportCallIssue]
    return tensor if row.device == "cpu" else tensor.to(row.device)
