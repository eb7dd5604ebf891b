"""Files of slices: where each lies, written through to the disk, read at the place that is needed.

A file is of the safetensors format. Which slices are in it decides its header, their order and so
every offset (`FileLayout`). A slice that is a full tensor has the tensor's name there, another has
its indices behind it: ``w[0:4, 2:8]``. The header's metadata are at the front: the file's identity,
and the CRC-32C of all slices, eight digits for each. So a slice is read and checked with its place
in the file alone:

    {"__metadata__":{"id":"9d41...00000003","crc32c":"5f0c71b20a9e43d1"},"w[0:4, 2:8]":{...},...}

The identity is 16 random bytes of the save, in the manifest, too, and the rank that wrote the file.
It is compared whenever the file is opened. A file of another save may have the same name, the same
length, and checksums that are right for its own slices. The checksum of the header would show that,
but needs all of the header: a rank that reads one slice of each of 10,000 files would read the
descriptions of all slices. The identity costs 63 bytes of each. Every save writes all of its files,
so no file is named by two manifests.

Files of formats 2 and 3 have no metadata: their manifests have the checksums.

Reading copies straight to where the elements belong. A slice, or consecutive elements of it, whose
memory is contiguous is copied there in one pass with its sum; else the file is mapped and copied
from row by row, and only pages that hold wanted elements are touched.

A map is private, and reserves no memory: a file may be larger than memory. Where the system refuses
even that (a limit on the address space, no overcommitting), the slice is read into memory instead.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from dure.checkpoint.file_systems import OpenFile, file_system_of, open_file
from dure.checkpoint.files import (
    DTYPES,
    PIECE_BYTES,
    damaged,
    pieces,
    readable,
    unreadable,
)
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.slices import Box, full_box
from dure.comm.checksum import crc32c
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointDamaged, CheckpointNotWritten
from dure.trace.plain_files import parse_json

__all__ = [
    "FileLayout",
    "FileMap",
    "FileRecord",
    "Slice",
    "SliceFile",
    "Stored",
    "TensorKind",
    "file_id",
    "kind_of",
    "new_save_id",
    "write_slices",
]

_FRONT = b'{"__metadata__":{"id":"'
_ID_BYTES = 40
_ID_BEGIN = 8 + len(_FRONT)
_ID_END = _ID_BEGIN + _ID_BYTES
_SUMS_BEGIN = _ID_END + len(b'","crc32c":"')
"""Where the checksums begin in a file."""
_SUM_BYTES = 8
_SHOWN = 200
_SHORT_HEADER = 1 << 20
"""A header up to this length is always compared; a longer one, if as many bytes of slices are read.

A rank's header describes all its slices. Loads of one slice of each of many ranks would read them
all."""

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


class Stored(NamedTuple):
    """Where a slice is."""

    file: int
    """The number of its file."""
    begin: int
    """From the beginning of the file."""
    crc32c: int | None = None
    """None: not known, or in the header of the file."""
    place: int | None = None
    """Which of the checksums in the header is its own; None: none of them."""


class FileRecord(NamedTuple):
    """What is known of a file without opening it."""

    num_bytes: int
    header_bytes: int
    header_crc32c: int
    id: str = ""
    """Its identity (`file_id`); "": it has none, or it is not known."""


def new_save_id() -> str:
    """Return the identity of a new save: 16 random bytes as digits. No generator is advanced."""
    return os.urandom(16).hex()


def file_id(save_id: str, rank: int) -> str:
    """Return the identity of the file that a rank writes in a save."""
    return f"{save_id}{rank:08d}"


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
        return cls._of(_in_order(slices, kinds), kinds, metadata, is_old=True)

    @classmethod
    def summed(cls, slices: Iterable[Slice], kinds: dict[str, TensorKind]) -> FileLayout:
        """Lay slices out as `of`, with places for identity and checksums (`completed`)."""
        parts = _in_order(slices, kinds)
        metadata = {"id": "0" * _ID_BYTES, "crc32c": "0" * (_SUM_BYTES * len(parts))}
        return cls._of(parts, kinds, metadata, is_old=False)

    @classmethod
    def _of(
        cls,
        parts: Sequence[Slice],
        kinds: dict[str, TensorKind],
        metadata: dict[str, str] | None,
        is_old: bool,
    ) -> FileLayout:
        fields: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        begins, end = dict[Slice, int](), 0
        for part in parts:
            kind = kinds[part.name]
            called, entry = _entry(part, kind, end)
            if is_old:
                called = part.name if part.box == full_box(kind.shape) else f"{part.name}{part.box}"
                while called in fields:  # "w[0:4]" may be the name of a tensor
                    called += "'"
            begins[part], end = end, end + kind.num_bytes(part.box)
            fields[called] = entry
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begins = {part: len(header) + at for part, at in begins.items()}
        return cls(header, begins, len(header) + end)

    def completed(self, identity: str, sums: bytes) -> bytes:
        """Return the header of `summed` with an identity, and checksums in the order of `begins`.

        Args:
            identity: Of the file (`file_id`).
            sums: Eight digits for each slice.
        """
        return self._with(identity.encode(), sums)

    def is_header(self, header: bytes) -> bool:
        """Return whether a header is that of `summed`, with any identity and checksums."""
        end = _SUMS_BEGIN + _SUM_BYTES * len(self.begins)
        return self._with(header[_ID_BEGIN:_ID_END], header[_SUMS_BEGIN:end]) == header

    def _with(self, identity: bytes, sums: bytes) -> bytes:
        header, end = self.header, _SUMS_BEGIN + len(sums)
        return header[:_ID_BEGIN] + identity + header[_ID_END:_SUMS_BEGIN] + sums + header[end:]

    @property
    def record(self) -> FileRecord:
        """What is known of the file, if its header is this one."""
        return FileRecord(self.num_bytes, len(self.header), crc32c(self.header))


def _entry(part: Slice, kind: TensorKind, begin: int) -> tuple[str, dict[str, Any]]:
    """Return the name and the entry of a slice in the header of its file.

    A tensor may be called "w[0:4]". As full tensors of such names have their indices behind the
    name, too, no two slices have one name.
    """
    is_full = part.box == full_box(kind.shape) and not part.name.endswith("]")
    stored = _COMPLEX.get(kind.dtype)
    shape = part.box.sizes if stored is None else (*part.box.sizes, 2)
    dtype = kind.dtype if stored is None else stored[1]
    offsets = [begin, begin + kind.num_bytes(part.box)]
    name = part.name if is_full else f"{part.name}{part.box}"
    return name, {"dtype": dtype, "shape": [*shape], "data_offsets": offsets}


def _in_order(slices: Iterable[Slice], kinds: dict[str, TensorKind]) -> list[Slice]:
    """Return slices in the order of their file; `planning.Division` works out the same order."""
    return sorted(slices, key=lambda part: (-kinds[part.name].torch_dtype.itemsize, part))


def write_slices(
    path: AnyPath, layout: FileLayout, memory: Mapping[Slice, torch.Tensor], identity: str
) -> FileRecord:
    """Write slices to a new file, through to the disk; return what a manifest has of it.

    An upload cannot be changed: then the checksums, which come first, are worked out before it.

    Args:
        path: The file.
        layout: As `FileLayout.summed` returns it.
        memory: The slices.
        identity: Of the file (`file_id`); a manifest has it once for all files.

    Raises:
        OSError: The disk is full, or the file cannot be written.
        CheckpointNotWritten: The program changed a tensor while it was uploaded.

    Cost:
        One pass over the bytes, two if it is an upload; memory: one slice where it is not
        contiguous on the CPU.
    """
    with file_system_of(path).new_file(path, layout.num_bytes) as file:
        header = layout.header
        if not file.can_rewrite:
            sums = b"".join([_sum(memory[part]) for part in layout.begins])
            header = layout.completed(identity, sums)
        file.write(memoryview(header))
        sums = b"".join([_sum(memory[part], file.write) for part in layout.begins])
        written = layout.completed(identity, sums)
        if file.can_rewrite:
            file.rewrite(memoryview(written))
        elif written != header:
            raise CheckpointNotWritten(
                "a tensor was changed while it was saved",
                path=str(path),
                seen=", ".join(part.name for part in layout.begins)[:_SHOWN],
                fix="Change tensors after save() has returned, or save with async_save().",
            )
    return FileRecord(layout.num_bytes, len(written), crc32c(written))


def _sum(tensor: torch.Tensor, write: Callable[[memoryview], None] | None = None) -> bytes:
    """Return the CRC-32C of a slice, as digits, and write the slice."""
    crc = 0
    for data in pieces(tensor):
        crc = crc32c(data, crc)
        if write is not None:
            write(data)
    return b"%08x" % crc


class FileMap:
    """A private map of a file, valid after the file is closed; writes do not reach the file.

    Args:
        file: The file.
        num_bytes: Its length.

    Raises:
        OSError: The system refuses, or the file is not a local one.
    """

    def __init__(self, file: OpenFile, num_bytes: int) -> None:
        if file.descriptor is None:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        # Python's mmap would keep the file open, and torch's reserves memory for the complete file.
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _LIBC.mmap(None, num_bytes, prot, flags, file.descriptor, 0)
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


_SUM = re.compile(rb"[0-9a-f]{8}")
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
        record: Its record in the manifest.
        stays_open: Whether it is open until `close`, or only while something is read.
        num_wanted: How many bytes of slices will be read; of a header that is long, and longer
            than these, only the identity is compared. None: all of it is.

    Raises:
        CheckpointDamaged: It is absent, not a file, has another length, identity or header.
        CheckpointError: It cannot be opened or read.
    """

    def __init__(
        self,
        path: AnyPath,
        record: FileRecord,
        stays_open: bool = True,
        num_wanted: int | None = None,
    ) -> None:
        self.path, self.record = path, record
        self._file: OpenFile | None = None
        self._map: FileMap | None = None
        self._sums: bytes | None = None
        """The checksums in the header, if that was read."""
        with readable(path):
            file = open_file(path)
            try:
                self._check(file, num_wanted)
                if stays_open or file.descriptor is None:  # nothing is open in a store
                    self._file = file
            finally:
                if self._file is None:
                    file.close()

    def _check(self, file: OpenFile, num_wanted: int | None) -> None:
        wanted, length, crc, identity = self.record
        self._require_size(file)
        # Without an identity a file of another save is known by its header alone.
        if identity and num_wanted is not None and length > max(_SHORT_HEADER, num_wanted):
            self._require_id(file.read(8, _ID_END - 8))
            return
        header = file.read(0, min(length, wanted))
        self._require_id(header[8:])
        if len(header) != length or crc32c(header) != crc:
            raise self._damaged(f"{self.path.name} has another header than its manifest says")
        self._sums = header[_SUMS_BEGIN : header.find(b'"', _SUMS_BEGIN)]

    def _require_size(self, file: OpenFile) -> None:
        size, wanted = file.num_bytes(), self.record.num_bytes
        if size != wanted:
            kind = "truncated" if size < wanted else "longer than it was"
            raise self._damaged(f"{self.path.name} is {kind}: {size} bytes, {wanted} were written")

    def _require_id(self, front: bytes) -> None:
        """Compare the identity; `front` is the header's text, at least up to there."""
        if self.record.id and not front.startswith(_FRONT + self.record.id.encode()):
            raise self._damaged(
                f"{self.path.name} is of another save, or of another rank, than its manifest says"
            )

    def header(self) -> bytes:
        """Return the header.

        Raises:
            CheckpointError: The file cannot be read.
        """
        with self._open() as file:
            return file.read(0, self.record.header_bytes)

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
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def _open(self) -> Iterator[OpenFile]:
        """Yield the open file; an OSError is converted (`readable`).

        A file that is opened again may have been replaced since.
        """
        with readable(self.path):
            if self._file is not None:
                yield self._file
                return
            file = open_file(self.path)
            try:
                self._require_size(file)
                if self.record.id:
                    self._require_id(file.read(8, _ID_END - 8))
                yield file
            finally:
                file.close()

    def compare(
        self, parts: Iterable[tuple[Slice, Stored]], kinds: Mapping[str, TensorKind]
    ) -> None:
        """Compare the places of slices with the header, if it was read, and has their checksums.

        Raises:
            CheckpointDamaged: The manifest has one elsewhere.
            CheckpointError: The file cannot be read.
        """
        summed = [one for one in parts if one[1].place is not None]
        if self._sums is None or not summed:
            return
        try:
            # A header whose identity is right begins as an object.
            entries = cast(dict[str, Any], parse_json(self.header()[8:]))
        except ValueError:
            entries = {}
        for part, stored in summed:
            begin = stored.begin - self.record.header_bytes
            name, entry = _entry(part, kinds[part.name], begin)
            if entries.get(name) != entry:
                raise self._damaged(
                    f"{self.path.name} has other slices than its manifest says: {name!r:.100}"
                )

    def _require_inside(self, part: Slice, stored: Stored, num_bytes: int) -> None:
        """Refuse a manifest that has a place of a slice beyond the end of its file."""
        begin, end = self.record.header_bytes, self.record.num_bytes
        is_inside = begin <= stored.begin <= end - num_bytes
        if stored.place is not None:
            sum_end = _SUMS_BEGIN + _SUM_BYTES * (stored.place + 1)
            is_inside = is_inside and sum_end < begin
        if not is_inside:
            seen = f"{part.name}{part.box} is not within {self.path.name}, where its manifest says"
            raise self._damaged(seen)

    def sum_of(self, part: Slice, stored: Stored) -> int | None:
        """Return the checksum that a slice was written with; None: it has none.

        Raises:
            CheckpointDamaged: There are no digits in its place.
            CheckpointError: The file cannot be read.
        """
        if stored.place is None:
            return stored.crc32c
        if self._sums is not None:
            return self._sum(None, part, stored.place)
        with self._open() as file:
            return self._sum(file, part, stored.place)

    def _sum(self, file: OpenFile | None, part: Slice, place: int) -> int:
        """Return a checksum of the header, from the file if the header was not read."""
        at = _SUM_BYTES * place
        if self._sums is not None:
            text = self._sums[at : at + _SUM_BYTES]
        else:
            assert file is not None
            text = file.read(_SUMS_BEGIN + at, _SUM_BYTES)
        if not _SUM.fullmatch(text):
            seen = f"the checksum of {part.name}{part.box} in {self.path.name} is changed"
            raise self._damaged(seen)
        return int(text, 16)

    def read(
        self, part: Slice, stored: Stored, dtype: torch.dtype, box: Box, to: torch.Tensor
    ) -> None:
        """Copy elements `box` of a slice to `to`; check the slice's sum if it is read completely.

        Args:
            part: The slice.
            stored: Where it is.
            dtype: Of the tensor in the file.
            box: Indices in the full tensor, within the slice's.
            to: Where they go, [*box.sizes]; any dtype, strides and device.

        Raises:
            CheckpointDamaged: The bytes are not those that were written.
            CheckpointError: The file cannot be read.
        """
        self._require_inside(part, stored, part.box.num_elements * dtype.itemsize)
        if self._file is None:
            with self._open() as file:
                self._read_checked(file, part, stored, dtype, box, to)
        else:
            try:
                self._read_checked(self._file, part, stored, dtype, box, to)
            except OSError as e:
                raise unreadable(self.path, e) from e

    def _read_checked(
        self,
        file: OpenFile,
        part: Slice,
        stored: Stored,
        dtype: torch.dtype,
        box: Box,
        to: torch.Tensor,
    ) -> None:
        wanted = None
        if box == part.box:
            place = stored.place
            wanted = stored.crc32c if place is None else self._sum(file, part, place)
        crc = self._read(file, part, stored.begin, wanted is not None, dtype, box, to)
        if crc not in (None, wanted):
            raise self._damaged(self._changed(part))

    def _read(
        self,
        file: OpenFile,
        part: Slice,
        at: int,
        summed: bool,
        dtype: torch.dtype,
        box: Box,
        to: torch.Tensor,
    ) -> int | None:
        """Copy elements of a slice; return the slice's sum if it is asked for."""
        run = box.run_in(part.box)
        straight = to.is_contiguous() and to.is_cpu and to.dtype == dtype
        if run is not None and straight and not (to.is_conj() or to.is_neg()):
            data = memoryview(cast(Any, as_bytes(to).numpy()))
            return self._pread(file, data, at + run[0] * dtype.itemsize, summed)
        mapped = self._mapped_slice(file, part, at, dtype)
        data = memoryview(cast(Any, as_bytes(mapped).numpy()))
        crc = crc32c(data) if summed else None
        to.copy_(mapped[box.within(part.box)])
        return crc

    def _changed(self, part: Slice) -> str:
        return f"{part.name}{part.box} in {self.path.name} is changed: its checksum is wrong"

    def fault(self, part: Slice, stored: Stored, num_bytes: int) -> str | None:
        """Read a slice, and return what is wrong with it.

        None: nothing is, or it has no checksum.

        Args:
            part: The slice.
            stored: Where it is.
            num_bytes: Its length.

        Raises:
            CheckpointDamaged: The file became shorter.
            CheckpointError: The file cannot be read.

        Cost:
            One pass over the bytes; memory: one piece.
        """
        self._require_inside(part, stored, num_bytes)
        wanted = self.sum_of(part, stored)
        if wanted is None:
            return None
        at, crc = stored.begin, 0
        end = at + num_bytes
        while self._map is not None and at < end:
            data = self._map.piece(at, min(PIECE_BYTES, end - at))
            if data is None:
                break
            crc, at = crc32c(data, crc), at + len(data)
        if at < end:
            with self._open() as file:
                piece = memoryview(bytearray(min(end - at, file.piece_bytes)))
                while at < end:
                    data = piece[: end - at]
                    count = self._read_into(file, data, at)
                    crc, at = crc32c(data[:count], crc), at + count
        return None if crc == wanted else self._changed(part)

    def map(self) -> SliceFile:
        """Map the file, if the system allows it, for all later reads; return this object.

        Raises:
            CheckpointError: The file cannot be opened.
        """
        with self._open() as file, suppress(OSError):
            self._map = FileMap(file, self.record.num_bytes)
        return self

    def _pread(self, file: OpenFile, data: memoryview, at: int, summed: bool) -> int | None:
        """Read bytes to `data`; return their sum if it is asked for."""
        crc = 0
        if len(data) >= PIECE_BYTES:
            count, crc = file.copy_into(data, at, summed)
            data, at = data[count:], at + count
        while data:
            count = self._read_into(file, data[: file.piece_bytes], at)
            crc = crc32c(data[:count], crc) if summed else 0
            data, at = data[count:], at + count
        return crc if summed else None

    def _read_into(self, file: OpenFile, data: memoryview, at: int) -> int:
        count = file.read_into(data, at)
        if not count:
            raise self._damaged(f"{self.path.name} became shorter")
        return count

    def _mapped_slice(
        self, file: OpenFile, part: Slice, at: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a complete slice, mapped if the system allows it."""
        try:
            if self._map is None:
                self._map = FileMap(file, self.record.num_bytes)
            return self._map.tensor(at, part.box, dtype)
        except OSError:
            read = torch.empty(part.box.sizes, dtype=dtype, device="cpu")
            self._pread(file, memoryview(cast(Any, as_bytes(read).numpy())), at, False)
            return read

    def mapped_slice(self, part: Slice, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete slice, mapped if the system allows it; valid after the file is closed.

        Raises:
            CheckpointDamaged: The manifest has it outside of the file.
            CheckpointError: The file cannot be read.
        """
        self._require_inside(part, stored, part.box.num_elements * dtype.itemsize)
        if self._map is not None:
            return self._map.tensor(stored.begin, part.box, dtype)
        with self._open() as file:
            return self._mapped_slice(file, part, stored.begin, dtype)
