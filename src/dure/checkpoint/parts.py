"""Files of tensors, in the safetensors format: streamed out, mapped in, checked byte by byte.

A part is what one rank writes: eight bytes with the length of a JSON header, the header (each
tensor's dtype, shape and place), and the tensors' bytes one after another. Any reader of
safetensors can open one.

Writing goes through in pieces, so a model is never held twice. For each tensor
the CRC-32 of its bytes is kept for the manifest. As the manifest knows every tensor, it also knows
the only header and the only length that the file can have: so each byte of a part is checked.

Reading maps the file: a tensor is a view of the page cache until it is copied to where it belongs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open

from dure.comm.reduction import as_bytes

__all__ = [
    "DTYPES",
    "PIECE_BYTES",
    "Entry",
    "PartReader",
    "can_be_named",
    "can_be_stored",
    "dealt_out",
    "dtype_name",
    "header",
    "pieces",
    "write_all",
    "write_part",
]

T = TypeVar("T", bound=Any)

PIECE_BYTES = 1 << 18
"""What is written, or read, at once; a checksum finds it in the cache of its core."""
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a part, as the manifest knows it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    crc32: int

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Entry:
        """Make an entry of what `dump` returned."""
        shape = tuple(int(n) for n in fields["shape"])
        num_bytes, crc32 = int(fields["num_bytes"]), int(fields["crc32"])
        return cls(str(fields["name"]), str(fields["dtype"]), shape, num_bytes, crc32)

    def dump(self) -> dict[str, Any]:
        """Return JSON's types."""
        return asdict(self)


def can_be_stored(dtype: torch.dtype) -> bool:
    """Tell whether the file format knows the dtype."""
    return dtype in DTYPES


def can_be_named(name: str) -> bool:
    """Tell whether readers of the file format take a tensor of this name."""
    return name != "__metadata__" and not any("\ud800" <= c <= "\udfff" for c in name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the file format's name of a dtype."""
    return DTYPES[dtype]


def write_part(path: Path, tensors: dict[str, torch.Tensor]) -> list[Entry]:
    """Write tensors to a new file, through to the disk; return an entry for each, in file order.

    Raises:
        OSError: The disk is full, or the file cannot be written.

    Cost: one pass over the bytes; memory: one tensor where it is not contiguous on the CPU.
    """
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # keeps alignment
    blank = [
        Entry(name, DTYPES[t.dtype], tuple(t.shape), t.numel() * t.element_size(), 0)
        for name, t in order
    ]
    entries: list[Entry] = []
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(header(blank)))
        for entry, (_, tensor) in zip(blank, order, strict=True):
            crc = 0
            for piece in pieces(tensor):
                crc = zlib.crc32(piece, crc)
                write_all(file.fileno(), piece)
            entries.append(Entry(entry.name, entry.dtype, entry.shape, entry.num_bytes, crc))
        os.fsync(file.fileno())
    return entries


def header(entries: list[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """Return the first bytes of a part with these tensors, in this order."""
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.num_bytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        at += entry.num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, as_bytes(tensor.detach().cpu().contiguous()).numpy()))


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, a piece at a time."""
    data = _bytes_of(tensor)
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def write_all(descriptor: int, data: memoryview) -> None:
    """Write bytes to a file, all of them; OSError where that fails."""
    while data:
        data = data[os.write(descriptor, data) :]


def dealt_out(sizes: dict[T, int], num_ranks: int) -> dict[T, int]:
    """Deal things of given sizes out to ranks, the largest first, each to the least loaded."""
    loads = [0] * num_ranks
    owner: dict[T, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        owner[name] = rank
        loads[rank] += sizes[name]
    return owner


class PartReader:
    """Reads one part. Its tensors stay valid when the reader, and even the file, is gone.

    Args:
        path: The file.
        entries: What the manifest says is in it, in its order.
    """

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self._path = path
        self._entries = {entry.name: entry for entry in entries}
        self._file: Any = None

    def fault(self) -> str | None:
        """Say what is wrong with the file as a whole, its tensors' bytes aside; None: nothing."""
        begin = header(list(self._entries.values()))
        wanted = len(begin) + sum(e.num_bytes for e in self._entries.values())
        try:
            size = self._path.stat().st_size
            if size != wanted:
                kind = "truncated" if size < wanted else "longer than it was"
                return f"{self._path.name} is {kind}: {size} bytes, {wanted} were written"
            with self._path.open("rb") as file:
                if file.read(len(begin)) != begin:
                    return f"{self._path.name} is changed in its header"
        except OSError as e:
            return f"{self._path.name} cannot be read: {e.strerror}"
        return None

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that is mapped from the file; writes to it do not reach the file."""
        if self._file is None:
            self._file = safe_open(self._path, framework="pt")
        return cast(torch.Tensor, self._file.get_tensor(name))

    def tensor_fault(self, name: str) -> str | None:
        """Read a tensor's bytes and say what is wrong with them; None: nothing."""
        try:
            crc = 0
            for piece in pieces(self.tensor(name)):
                crc = zlib.crc32(piece, crc)
        except (OSError, SafetensorError) as e:
            return f"{name} in {self._path.name} cannot be read: {e}"
        if crc != self._entries[name].crc32:
            return f"{name} in {self._path.name} is changed: its checksum is wrong"
        return None
