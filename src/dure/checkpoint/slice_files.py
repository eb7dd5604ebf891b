"""Files of slices: where each lies, written through to the disk, read at the place that is needed.

A file is of the safetensors format. Which slices are in it decides its header, their order and so
every offset (`Layout`): a manifest that says otherwise is not of that file. A slice that is a
whole tensor has the tensor's name there, another has its indices behind it: ``w[0:4, 2:8]``.

Reading copies straight to where the elements belong. A slice, or consecutive elements of it, whose
memory is contiguous is copied there in one pass with its sum; else the file is mapped and copied
from row by row, and only pages that hold wanted elements are touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from dure.checkpoint.files import DTYPES, PIECE_BYTES, open_file, pieces, write_all
from dure.checkpoint.slices import Box, whole_box
from dure.comm.checksum import copy_from_file, crc32c
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointError

__all__ = ["Kind", "Layout", "Slice", "SliceFile", "kind_of", "write_slices"]

_COMPLEX = {"C64": (torch.complex64, "F32"), "C128": (torch.complex128, "F64")}
"""Kinds that the file format lacks: stored as pairs of numbers of another kind."""
_TORCH = {name: dtype for dtype, name in DTYPES.items()} | {k: d for k, (d, _) in _COMPLEX.items()}
_KIND_OF = {dtype: kind for kind, dtype in _TORCH.items()}


class Kind(NamedTuple):
    """What a whole tensor is: its dtype's name in the file format, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; KeyError where there is none of that name."""
        return _TORCH[self.dtype]

    def num_bytes(self, box: Box) -> int:
        """Bytes of a slice."""
        return box.num_elements * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def kind_of(tensor: torch.Tensor) -> Kind | None:
    """Return what a tensor (a DTensor: the whole) is; None: the format has no such dtype."""
    dtype = _KIND_OF.get(tensor.dtype)
    return None if dtype is None else Kind(dtype, tuple(tensor.shape))


class Slice(NamedTuple):
    """A box of the tensor of that name."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """Where slices lie in the file that holds them."""

    header: bytes
    begins: dict[Slice, int]
    """In the order in which they lie."""
    num_bytes: int

    @classmethod
    def of(
        cls,
        slices: Iterable[Slice],
        kinds: dict[str, Kind],
        metadata: dict[str, str] | None = None,
    ) -> Layout:
        """Lay slices out: largest elements first, which keeps alignment, then by name."""

        def key(part: Slice) -> tuple[int, Slice]:
            return -kinds[part.name].torch_dtype.itemsize, part

        fields: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        begins, end = dict[Slice, int](), 0
        for part in sorted(slices, key=key):
            kind = kinds[part.name]
            called = part.name + ("" if part.box == whole_box(kind.shape) else str(part.box))
            while called in fields:  # "w[0:4]" may be the name of a tensor
                called += "'"
            stored = _COMPLEX.get(kind.dtype)
            shape = part.box.sizes if stored is None else (*part.box.sizes, 2)
            dtype = kind.dtype if stored is None else stored[1]
            begins[part], end = end, end + kind.num_bytes(part.box)
            offsets = [begins[part], end]
            fields[called] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begins = {part: len(header) + at for part, at in begins.items()}
        return cls(header, begins, len(header) + end)


def write_slices(path: Path, layout: Layout, memory: dict[Slice, torch.Tensor]) -> list[int]:
    """Write slices to a new file, through to the disk; return the CRC-32C of each, in its order.

    Raises:
        OSError: The disk is full, or the file cannot be written.

    Cost: one pass over the bytes; memory: one slice where it is not contiguous on the CPU.
    """
    sums: list[int] = []
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(layout.header))
        for part in layout.begins:
            crc = 0
            for data in pieces(memory[part]):
                crc = crc32c(data, crc)
                write_all(file.fileno(), data)
            sums.append(crc)
        os.fsync(file.fileno())
    return sums


class SliceFile:
    """A file that is open for reading, by several threads at once.

    Args:
        path: The file.
        layout: What must be in it.

    Raises:
        CheckpointError: It is no file, has another length, or another header.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self._map: Any = None  # torch.UntypedStorage
        try:
            self._descriptor = open_file(path)
        except OSError as e:
            raise self._error(f"{path.name} {e.strerror}") from e
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        size, wanted = os.fstat(self._descriptor).st_size, self.layout.num_bytes
        if size != wanted:
            kind = "truncated" if size < wanted else "longer than it was"
            raise self._error(f"{self.path.name} is {kind}: {size} bytes, {wanted} were written")
        if os.pread(self._descriptor, len(self.layout.header), 0) != self.layout.header:
            raise self._error(f"{self.path.name} has another header than its manifest says")

    def _error(self, seen: str) -> CheckpointError:
        return CheckpointError(
            "the checkpoint is damaged", path=str(self.path), seen=f"{seen}; in {self.path.parent}"
        )

    def close(self) -> None:
        """Close the file; what is mapped stays until it is used no more."""
        os.close(self._descriptor)

    def read(
        self, part: Slice, wanted: int | None, dtype: torch.dtype, box: Box, to: torch.Tensor
    ) -> None:
        """Copy the elements `box` of a slice to `to`; check the slice's sum if it is read whole.

        Args:
            part: The slice.
            wanted: CRC-32C of its bytes; None: not known.
            dtype: Of the tensor in the file.
            box: Indices in the whole tensor, within the slice's.
            to: Where they go, [*box.sizes]; any dtype, strides and device.

        Raises:
            CheckpointError: The file cannot be read, or its bytes are not those that were written.
        """
        at, run = self.layout.begins[part], box.run_in(part.box)
        straight = to.is_contiguous() and to.is_cpu and to.dtype == dtype
        straight = straight and not (to.is_conj() or to.is_neg())
        summed = box == part.box and wanted is not None
        if run is not None and straight:
            data = memoryview(cast(Any, as_bytes(to).numpy()))
            crc = self._pread(data, at + run[0] * dtype.itemsize, summed)
        else:
            lying = self._mapped(at, part.box, dtype)
            data = memoryview(cast(Any, as_bytes(lying).numpy()))
            crc = crc32c(data) if summed else None
            to.copy_(lying[box.within(part.box)])
        if crc not in (None, wanted):
            raise self._error(
                f"{part.name}{part.box} in {self.path.name} is changed: its checksum is wrong"
            )

    def _pread(self, data: memoryview, at: int, summed: bool) -> int | None:
        """Read bytes to `data`; return their sum if it is asked for."""
        crc = 0
        if len(data) >= PIECE_BYTES:
            count, crc = copy_from_file(self._descriptor, at, data, summed)
            data, at = data[count:], at + count
        while data:
            count = os.preadv(self._descriptor, [data[:PIECE_BYTES]], at)
            if not count:
                raise self._error(f"{self.path.name} became shorter")
            crc = crc32c(data[:count], crc) if summed else 0
            data, at = data[count:], at + count
        return crc if summed else None

    def mapped(self, part: Slice, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole slice, mapped: valid when the file is closed; writes do not reach it."""
        return self._mapped(self.layout.begins[part], part.box, dtype)

    def _mapped(self, at: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        if not box.num_elements:
            return torch.empty(box.sizes, dtype=dtype)
        if self._map is None:
            # Python's mmap would keep the file open for as long as a tensor lies in it.
            name = f"/proc/self/fd/{self._descriptor}"
            self._map = torch.UntypedStorage.from_file(name, False, self.layout.num_bytes)
        whole = torch.empty(0, dtype=torch.uint8).set_(self._map)  # pyright: ignore
        flat = torch.frombuffer(whole.numpy(), dtype=dtype, count=box.num_elements, offset=at)
        return flat.view(box.sizes)
