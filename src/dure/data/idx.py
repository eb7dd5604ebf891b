"""IDX files: the format of MNIST and the many data sets made in its likeness.

A file is a header and bytes. All numbers are big-endian:

    0  0  type  ndim      type 0x08 means unsigned bytes, the only one used for images
    dim[0] ... dim[ndim-1]    32 bits each; dim[0] counts the images, or the labels
    dim[0] * ... * dim[ndim-1] bytes, and nothing after them

A data set is four such files in one directory: images (ndim 3) and labels (ndim 1), for training
and for testing. Each may be gzipped (known by its first bytes, not its name) and may be spelled
``train-images-idx3-ubyte`` or ``train-images.idx3-ubyte``. Nothing read is trusted: a header that
does not fit, a length that the header does not announce or a broken gzip stream is a `DataError`
that names the file. This module needs no torch.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dure.errors import DataError
from dure.trace.plain_files import open_plain

__all__ = ["IdxSplit", "read_idx", "read_idx_directory"]

_UBYTE = 0x08
_KINDS = {1: "labels", 3: "images"}
_GZIP = b"\x1f\x8b"
_PIECE_BYTES = 1 << 20
_SHOWN_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IdxSplit:
    """Images and labels.

    Attributes:
        images: uint8 [n, height, width].
        labels: uint8 [n].

    Obtained from:
        `read_idx_directory`.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


def read_idx_directory(directory: str | Path) -> tuple[IdxSplit, IdxSplit]:
    """Read the four IDX files of a data set.

    Args:
        directory: Where train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k- files
            are, each plain or .gz.

    Returns:
        The training and the test split.

    Raises:
        DataError: The directory or a file is missing, or a file is truncated, foreign, or does not
            fit the others.

    Cost:
        Reads every file once, into memory (MNIST: 55 MB).

    Example:
        ```python
        from dure import data

        folder = Path(f"mnist{dist.get_rank()}")  # usually a folder of files that were downloaded
        folder.mkdir()
        for name, n in ("train", 3), ("t10k", 1):
            images = bytes([0, 0, 8, 3, 0, 0, 0, n, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(n * 2 * 2)
            labels = bytes([0, 0, 8, 1, 0, 0, 0, n, *range(n)])
            (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)

        train, test = data.read_idx_directory(folder)
        assert train.images.shape == (3, 2, 2) and test.labels.shape == (1,)
        ```
    """
    directory = Path(directory)
    if not directory.is_dir():
        kind = "a file" if directory.exists() else "nothing there"
        raise DataError(
            f"{directory} is not a directory of IDX files",
            seen=kind,
            fix="Give the directory that holds train-images-idx3-ubyte[.gz] and its companions.",
        )
    train, test = _read_split(directory, "train"), _read_split(directory, "t10k")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"the test images of {directory} do not fit its training images",
            seen=f"{_by(test.images.shape[1:])} pixels against {_by(train.images.shape[1:])}",
        )
    return train, test


def read_idx(path: str | Path, ndim: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes, plain or gzipped.

    Args:
        path: The file.
        ndim: How many dimensions it must have: 3 for images, 1 for labels.

    Returns:
        An array of the dimensions that the header announces.

    Raises:
        DataError: The file cannot be read, or is not such a file.

    Example:
        ```python
        labels = data.read_idx(folder / "train-labels-idx1-ubyte", ndim=1)
        assert labels.tolist() == [0, 1, 2]
        ```
    """
    path = Path(path)
    try:
        with os.fdopen(open_plain(path), "rb") as raw:
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if zipped else raw as file:
                return _read_array(file, path, ndim)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError(
            f"{path} is a damaged gzip file", seen=str(e), fix="Download or copy it again."
        ) from None
    except OSError as e:
        raise DataError(f"{path} cannot be read", seen=e.strerror or str(e)) from None


def _read_array(file: BinaryIO | gzip.GzipFile, path: Path, ndim: int) -> NDArray[np.uint8]:
    """Read header and bytes; refuse whatever the format does not allow."""
    wanted = bytes((0, 0, _UBYTE, ndim))
    magic = file.read(4)
    if magic != wanted:
        raise DataError(
            f"{path} is not an IDX file of {_KINDS.get(ndim, f'{ndim} dimensions')}",
            seen=f"begins with {_hex(magic)}, expected {_hex(wanted)}",
        )
    header = file.read(4 * ndim)
    if len(header) < 4 * ndim:
        raise _truncated(path, f"the header ends after {4 + len(header)} of {4 + 4 * ndim} bytes")
    shape = tuple(int(n) for n in np.frombuffer(header, dtype=">u4"))
    if 0 in shape:
        raise DataError(f"{path} is empty", seen=f"its header says {_by(shape)}")
    expected = math.prod(shape)
    content = _read_at_most(file, expected + 1)
    announced = f"the header announces {_by(shape)} = {expected:,} bytes"
    if len(content) < expected:
        raise _truncated(path, f"{announced}, {len(content):,} follow")
    if len(content) > expected:
        raise DataError(f"{path} is longer than its header says", seen=f"{announced}, more follow")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_at_most(file: BinaryIO | gzip.GzipFile, limit: int) -> bytearray:
    """Read up to `limit` bytes, piece by piece: a header that lies must not size an allocation."""
    content = bytearray()
    while piece := file.read(min(_PIECE_BYTES, limit - len(content))):
        content += piece
    return content


def _read_split(directory: Path, prefix: str) -> IdxSplit:
    image_path = _find(directory, f"{prefix}-images", "idx3-ubyte")
    label_path = _find(directory, f"{prefix}-labels", "idx1-ubyte")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{label_path} does not fit {image_path.name}",
            seen=f"{len(labels):,} labels for {len(images):,} images",
        )
    return IdxSplit(images=images, labels=labels)


def _find(directory: Path, stem: str, ending: str) -> Path:
    names = [f"{stem}{mark}{ending}{zipped}" for mark in "-." for zipped in ("", ".gz")]
    for name in names:
        if (directory / name).exists():
            return directory / name
    held = sorted(entry.name for entry in directory.iterdir())
    shown = ", ".join(held[:_SHOWN_NAMES]) + (", ..." if len(held) > _SHOWN_NAMES else "")
    raise DataError(
        f"{directory / names[0]}[.gz] is missing",
        seen=f"the directory holds {shown or 'nothing'}",
        fix="Give a directory with all four files of an IDX data set.",
    )


def _truncated(path: Path, seen: str) -> DataError:
    return DataError(f"{path} is truncated", seen=seen, fix="Download or copy it again.")


def _hex(data: bytes) -> str:
    return data.hex(" ") or "nothing"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)
