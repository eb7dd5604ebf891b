"""Files of slices: where each lies, written through to the disk, read at the place that is needed.

A file is of the safetensors format. Which slices are in it decides its header, their order and so
every offset (`FileLayout`): a manifest that says otherwise is not of that file. A slice that is a
full tensor has the tensor's name there, another has its indices behind it: ``w[0:4, 2:8]``.

Reading copies straight to where the elements belong. A slice, or consecutive elements of it, whose
memory is contiguous is copied there in one pass with its sum; else the file is mapped and copied
from row by row, and only pages that hold wanted elements are touched.

A map is private, and reserves no memory: a file may be larger than memory. Where the system refuses
even that (a limit on the address space, no overcommitting), the slice is read into memory instead.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from dure.checkpoint.files import (
    DTYPES,
    PIECE_BYTES,
    damaged,
    open_file,
    pieces,
    readable,
    unreadable,
    write_all,
)
from dure.checkpoint.slices import Box, full_box
from dure.comm.checksum import copy_from_file, crc32c
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointDamaged

__all__ = ["FileLayout", "FileMap", "Slice", "SliceFile", "TensorKind", "kind_of", "write_slices"]

_COMPLEX = {"C64": (torch.complex64, "F32"), "C128": (torch.complex128, "F64")}
"""Kinds that the file format lacks: stored as pairs of numbers of another kind."""
_TORCH = {name: dtype for dtype, name in DTYPES.items()} | {k: d for k, (d, _) in _COMPLEX.items()}
_KIND_OF = {dtype: kind for kind, dtype in _TORCH.items()}


class TensorKind(NamedTuple):
    """A full tensor's dtype, by its name in the file format, and its shape."""

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


def kind_of(tensor: torch.Tensor) -> TensorKind | None:
    """Return the kind of a (full) tensor; None: the format lacks its dtype."""
    dtype = _KIND_OF.get(tensor.dtype)
    return None if dtype is None else TensorKind(dtype, tuple(tensor.shape))


class Slice(NamedTuple):
    """A box of the tensor of that name."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Offsets of slices in the file that holds them."""

    header: bytes
    begins: dict[Slice, int]
    """In the order in which they lie."""
    num_bytes: int

    @classmethod
    def of(
        cls,
        slices: Iterable[Slice],
        kinds: dict[str, TensorKind],
        metadata: dict[str, str] | None = None,
    ) -> FileLayout:
        """Lay slices out: largest elements first, which keeps alignment, then by name."""

        def key(part: Slice) -> tuple[int, Slice]:
            return -kinds[part.name].torch_dtype.itemsize, part

        fields: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        begins, end = dict[Slice, int](), 0
        for part in sorted(slices, key=key):
            kind = kinds[part.name]
            called = part.name + ("" if part.box == full_box(kind.shape) else str(part.box))
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


def write_slices(path: Path, layout: FileLayout, memory: dict[Slice, torch.Tensor]) -> list[int]:
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


class FileMap:
    """A private map of a file, valid after the file is closed; writes do not reach the file.

    Args:
        descriptor: The file, open for reading.
        num_bytes: Its length.

    Raises:
        OSError: The system refuses.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        # Python's mmap would keep the file open, and torch's reserves memory for the complete file.
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _LIBC.mmap(None, num_bytes, prot, flags, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address = address
        self._bytes = (ctypes.c_ubyte * num_bytes).from_address(address)
        weakref.finalize(self._bytes, _LIBC.munmap, address, num_bytes).atexit = False

    def tensor(self, at: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the slice that begins at byte `at`. It keeps the map alive."""
        count = box.num_elements
        if not count:
            return torch.empty(box.sizes, dtype=dtype, device="cpu")
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=at).view(box.sizes)

    def piece(self, at: int, count: int) -> memoryview | None:
        """Load some bytes into memory, and return them; None if the system cannot read them.

        Accessing bytes that cannot be read would end the process by a signal.
        """
        before = (self._address + at) % mmap.PAGESIZE
        first = self._address + at - before
        if _LIBC.madvise(first, before + count, _MADV_POPULATE_READ):
            return None
        data = torch.frombuffer(self._bytes, dtype=torch.uint8, count=count, offset=at)
        return memoryview(cast(Any, data.numpy()))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED, _MAP_NORESERVE, _MADV_POPULATE_READ = ctypes.c_void_p(-1).value, 0x4000, 22


class SliceFile:
    """A file for reading, by several threads at once.

    Args:
        path: The file.
        layout: The expected contents.
        stays_open: Whether it is open until `close`, or only while something is read.

    Raises:
        CheckpointDamaged: It is absent, not a file, has another length, or another header.
        CheckpointError: It cannot be opened or read.
    """

    def __init__(self, path: Path, layout: FileLayout, stays_open: bool = True) -> None:
        self.path, self.layout = path, layout
        self._descriptor: int | None = None
        self._map: FileMap | None = None
        with readable(path):
            descriptor = open_file(path)
            try:
                self._check(descriptor)
                if stays_open:
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _check(self, descriptor: int) -> None:
        size, wanted = os.fstat(descriptor).st_size, self.layout.num_bytes
        if size != wanted:
            kind = "truncated" if size < wanted else "longer than it was"
            raise self._damaged(f"{self.path.name} is {kind}: {size} bytes, {wanted} were written")
        if os.pread(descriptor, len(self.layout.header), 0) != self.layout.header:
            raise self._damaged(f"{self.path.name} has another header than its manifest says")

    def _damaged(self, seen: str) -> CheckpointDamaged:
        return damaged(self.path.parent, seen)

    def __enter__(self) -> SliceFile:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; mappings of it stay until they are no longer used."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Yield a descriptor; an OSError is converted (`readable`)."""
        with readable(self.path):
            if self._descriptor is not None:
                yield self._descriptor
                return
            descriptor = open_file(self.path)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def read(
        self, part: Slice, wanted: int | None, dtype: torch.dtype, box: Box, to: torch.Tensor
    ) -> None:
        """Copy elements `box` of a slice to `to`; check the slice's sum if it is read completely.

        Args:
            part: The slice.
            wanted: CRC-32C of its bytes; None: not known.
            dtype: Of the tensor in the file.
            box: Indices in the full tensor, within the slice's.
            to: Where they go, [*box.sizes]; any dtype, strides and device.

        Raises:
            CheckpointDamaged: The bytes are not those that were written.
            CheckpointError: The file cannot be read.
        """
        summed = box == part.box and wanted is not None
        if self._descriptor is None:
            with self._open() as descriptor:
                crc = self._read(descriptor, part, summed, dtype, box, to)
        else:
            try:
                crc = self._read(self._descriptor, part, summed, dtype, box, to)
            except OSError as e:
                raise unreadable(self.path, e) from e
        if crc not in (None, wanted):
            raise self._damaged(self._changed(part))

    def _read(
        self,
        descriptor: int,
        part: Slice,
        summed: bool,
        dtype: torch.dtype,
        box: Box,
        to: torch.Tensor,
    ) -> int | None:
        """Copy elements of a slice; return the slice's sum if it is asked for."""
        at, run = self.layout.begins[part], box.run_in(part.box)
        straight = to.is_contiguous() and to.is_cpu and to.dtype == dtype
        if run is not None and straight and not (to.is_conj() or to.is_neg()):
            data = memoryview(cast(Any, as_bytes(to).numpy()))
            return self._pread(descriptor, data, at + run[0] * dtype.itemsize, summed)
        mapped = self._mapped_slice(descriptor, part, dtype)
        data = memoryview(cast(Any, as_bytes(mapped).numpy()))
        crc = crc32c(data) if summed else None
        to.copy_(mapped[box.within(part.box)])
        return crc

    def _changed(self, part: Slice) -> str:
        return f"{part.name}{part.box} in {self.path.name} is changed: its checksum is wrong"

    def fault(self, part: Slice, wanted: int, num_bytes: int) -> str | None:
        """Read a slice, and return what is wrong with it; None if it is as it was written.

        Args:
            part: The slice.
            wanted: CRC-32C of its bytes.
            num_bytes: Its length.

        Raises:
            CheckpointDamaged: The file became shorter.
            CheckpointError: The file cannot be read.

        Cost: one pass over the bytes; memory: one piece.
        """
        at, crc = self.layout.begins[part], 0
        end = at + num_bytes
        while self._map is not None and at < end:
            data = self._map.piece(at, min(PIECE_BYTES, end - at))
            if data is None:
                break
            crc, at = crc32c(data, crc), at + len(data)
        if at < end:
            piece = memoryview(bytearray(min(end - at, PIECE_BYTES)))
            with self._open() as descriptor:
                while at < end:
                    data = piece[: end - at]
                    count = self._preadv(descriptor, data, at)
                    crc, at = crc32c(data[:count], crc), at + count
        return None if crc == wanted else self._changed(part)

    def map(self) -> SliceFile:
        """Map the file, if the system allows it, for all later reads; return this object.

        Raises:
            CheckpointError: The file cannot be opened.
        """
        with self._open() as descriptor, suppress(OSError):
            self._map = FileMap(descriptor, self.layout.num_bytes)
        return self

    def _pread(self, descriptor: int, data: memoryview, at: int, summed: bool) -> int | None:
        """Read bytes to `data`; return their sum if it is asked for."""
        crc = 0
        if len(data) >= PIECE_BYTES:
            count, crc = copy_from_file(descriptor, at, data, summed)
            data, at = data[count:], at + count
        while data:
            count = self._preadv(descriptor, data[:PIECE_BYTES], at)
            crc = crc32c(data[:count], crc) if summed else 0
            data, at = data[count:], at + count
        return crc if summed else None

    def _preadv(self, descriptor: int, data: memoryview, at: int) -> int:
        count = os.preadv(descriptor, [data], at)
        if not count:
            raise self._damaged(f"{self.path.name} became shorter")
        return count

    def _mapped_slice(self, descriptor: int, part: Slice, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete slice, mapped if the system allows it."""
        at = self.layout.begins[part]
        try:
            if self._map is None:
                self._map = FileMap(descriptor, self.layout.num_bytes)
            return self._map.tensor(at, part.box, dtype)
        except OSError:
            read = torch.empty(part.box.sizes, dtype=dtype, device="cpu")
            self._pread(descriptor, memoryview(cast(Any, as_bytes(read).numpy())), at, False)
            return read

    def mapped_slice(self, part: Slice, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete slice, mapped if the system allows it; valid after the file is closed.

        Raises:
            CheckpointError: The file cannot be read.
        """
        if self._map is not None:
            return self._map.tensor(self.layout.begins[part], part.box, dtype)
        with self._open() as descriptor:
            return self._mapped_slice(descriptor, part, dtype)
