"""Files of tensors, in the safetensors format, and the errors of any file of a checkpoint.

A file of tensors is eight bytes with the length of a JSON header, the header (each tensor's dtype,
shape and place), and the tensors' bytes one after another. Any reader of safetensors can open one.
As the manifest knows every tensor, it also knows the only header and the only length that the file
can have: so each byte is checked.

A name in a folder may be a pipe, whose opening waits for a writer forever; or a link, whose target
may be anything. Both are refused, as are folders and devices.

Errors while a file is read are of two kinds. If the file is absent, or its bytes are not those that
were written, the checkpoint is damaged (`CheckpointDamaged`), and an older one may be used instead.
If the system could not open or read the file (too many open files, a stale handle, an I/O error),
its bytes may be intact: that is a `CheckpointError`, which stops the program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch

from dure.checkpoint.fsspec_path import AnyPath
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointDamaged, CheckpointError, CheckpointTooNew
from dure.trace.plain_files import NotAFile, release_that_reads

__all__ = [
    "DTYPES",
    "MANIFEST",
    "MOST_BYTES",
    "PIECE_BYTES",
    "can_be_named",
    "damaged",
    "pieces",
    "readable",
    "start_flush",
    "too_new",
    "unreadable",
    "write_all",
]

PIECE_BYTES = 1 << 18
"""What is written, or read, at once; a checksum finds it in the cache of its core."""
MOST_BYTES = 1 << 30
"""Of what is read completely: catalogs, indexes, journals."""
MANIFEST = "manifest.json"
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


def can_be_named(name: str) -> bool:
    """Tell whether readers of the file format take a tensor of this name."""
    if name.isascii():
        return name != "__metadata__"
    return not any("\ud800" <= c <= "\udfff" for c in name)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, as_bytes(tensor.detach().cpu().contiguous()).numpy()))


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, a piece at a time."""
    data = _bytes_of(tensor)
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def write_all(descriptor: int, data: memoryview, at: int | None = None) -> None:
    """Write bytes to a file, all of them; OSError where that fails.

    Args:
        descriptor: The file.
        data: The bytes.
        at: Where to, from the beginning of the file; None: at the descriptor's position.
    """
    while data:
        if at is None:
            data = data[os.write(descriptor, data) :]
        else:
            count = os.pwrite(descriptor, data, at)
            data, at = data[count:], at + count


def start_flush(descriptor: int, at: int, count: int) -> None:
    """Start to write bytes of a file to the disk.

    A later `os.fsync` waits for them and raises their errors.
    """
    if hasattr(os, "posix_fadvise"):  # on Linux; pages that are being written stay in memory
        with suppress(OSError):
            os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_DONTNEED)


@contextmanager
def readable(path: AnyPath) -> Iterator[None]:
    """Convert an OSError that is raised while the file `path` of a checkpoint is read.

    Raises:
        CheckpointDamaged: The file is absent, or it is not a plain file.
        CheckpointError: It cannot be opened or read; its bytes may be right.
    """
    try:
        yield
    except OSError as e:
        raise unreadable(path, e) from e


def unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the error for a file of a checkpoint whose reading raised an OSError."""
    if isinstance(error, FileNotFoundError):
        return damaged(path.parent, f"{path.name}: {error.strerror}")
    if isinstance(error, NotAFile):
        return damaged(path.parent, f"{path.name} {error.strerror}")
    return CheckpointError(
        "a file of the checkpoint cannot be read",
        path=str(path.parent),
        seen=f"{path.name}: {error.strerror or error}; in {path.parent}",
        fix="The checkpoint may be intact. Remove the cause, and load it again.",
    )


def damaged(folder: AnyPath, seen: str) -> CheckpointDamaged:
    """Return the error for a checkpoint whose bytes are not those that were written."""
    return CheckpointDamaged(
        "the checkpoint is damaged",
        path=str(folder),
        refused={str(folder): seen},
        seen=f"{seen}; in {folder}",
    )


def too_new(folder: AnyPath, seen: str, known: int, needs: object) -> CheckpointTooNew:
    """Return the error for a checkpoint of a newer format.

    Args:
        folder: The checkpoint.
        seen: Which file is of which format.
        known: The newest format that this release reads.
        needs: The value of the file's field of that name.
    """
    return CheckpointTooNew(
        "the checkpoint was written by a newer release of Dure",
        path=str(folder),
        seen=f"{seen}, and this release reads formats up to {known}; in {folder}",
        fix=f"Install {release_that_reads(needs)}.",
    )
