"""Files of tensors, in the safetensors format: their first bytes, and the pieces of what follows.

A part is what one rank writes: eight bytes with the length of a JSON header, the header (each
tensor's dtype, shape and place), and the tensors' bytes one after another. Any reader of
safetensors can open one. As the manifest knows every tensor, it also knows the only header and the
only length that the file can have: so each byte of a part is checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch

from dure.comm.reduction import as_bytes

__all__ = [
    "DTYPES",
    "PIECE_BYTES",
    "Entry",
    "can_be_named",
    "can_be_stored",
    "dealt_out",
    "dtype_name",
    "header",
    "pieces",
    "write_all",
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
    crc32c: int

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Entry:
        """Make an entry of what `dump` returned."""
        shape = tuple(int(n) for n in fields["shape"])
        num_bytes, crc32c = int(fields["num_bytes"]), int(fields["crc32c"])
        return cls(str(fields["name"]), str(fields["dtype"]), shape, num_bytes, crc32c)

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
