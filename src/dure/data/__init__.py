"""Data: who trains on which sample, in which order, and where real images come from.

Names are resolved on first use (PEP 562), so that a program without torch, such as the command
line, can check image files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.data.digits import read_digits, require_digits
    from dure.data.idx import IdxSplit, read_idx, read_idx_directory
    from dure.data.images import ImageData, Images, load_digits, load_idx
    from dure.data.loader import DataLoader
    from dure.data.partition import DataPartitioner, Partition
    from dure.data.sampler import DistributedSampler
    from dure.data.text import (
        TextData,
        Vocabulary,
        Windows,
        load_python_sources,
        read_python_sources,
    )

__all__ = [
    "DataLoader",
    "DataPartitioner",
    "DistributedSampler",
    "IdxSplit",
    "ImageData",
    "Images",
    "Partition",
    "TextData",
    "Vocabulary",
    "Windows",
    "load_digits",
    "load_idx",
    "load_python_sources",
    "read_digits",
    "read_idx",
    "read_idx_directory",
    "read_python_sources",
    "require_digits",
]

_HOME = {
    "DataLoader": "dure.data.loader",
    "DataPartitioner": "dure.data.partition",
    "Partition": "dure.data.partition",
    "DistributedSampler": "dure.data.sampler",
    "read_digits": "dure.data.digits",
    "require_digits": "dure.data.digits",
    "IdxSplit": "dure.data.idx",
    "read_idx": "dure.data.idx",
    "read_idx_directory": "dure.data.idx",
    "ImageData": "dure.data.images",
    "Images": "dure.data.images",
    "load_digits": "dure.data.images",
    "load_idx": "dure.data.images",
    "TextData": "dure.data.text",
    "Vocabulary": "dure.data.text",
    "Windows": "dure.data.text",
    "load_python_sources": "dure.data.text",
    "read_python_sources": "dure.data.text",
}


def __getattr__(name: str) -> object:
    """Import the module that holds `name`, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
