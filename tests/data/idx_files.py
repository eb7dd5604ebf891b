"""IDX files, written by hand."""

import struct
from pathlib import Path

import numpy as np


def encode(array: np.ndarray) -> bytes:
    """Return an array of bytes as a file of the format."""
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write one half of a data set."""
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(encode(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(encode(labels))


NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte",
    "t10k-labels": "t10k-labels-idx1-ubyte",
}


def write_data_set(directory, spell=lambda name: name, pack=lambda data: data):
    """Write a small, valid data set; return its arrays by stem."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images": rng.integers(0, 256, (12, 5, 4), dtype=np.uint8),
        "train-labels": np.arange(12, dtype=np.uint8) % 3,
        "t10k-images": rng.integers(0, 256, (6, 5, 4), dtype=np.uint8),
        "t10k-labels": np.arange(6, dtype=np.uint8) % 4,
    }
    for stem, array in arrays.items():
        (directory / spell(NAMES[stem])).write_bytes(pack(encode(array)))
    return arrays
