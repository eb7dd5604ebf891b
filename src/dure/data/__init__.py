"""Data: samples of each rank, their order, and sources of real images.

Names are resolved on first use (PEP 562), so that a program without torch, such as the command
line, can check image files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.torch_names import lazy_names

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

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.data.loader": ("DataLoader",),
    "dure.data.partition": ("DataPartitioner", "Partition"),
    "dure.data.sampler": ("DistributedSampler",),
    "dure.data.digits": ("read_digits", "require_digits"),
    "dure.data.idx": ("IdxSplit", "read_idx", "read_idx_directory"),
    "dure.data.images": ("ImageData", "Images", "load_digits", "load_idx"),
    "dure.data.text": (
        "TextData",
        "Vocabulary",
        "Windows",
        "load_python_sources",
        "read_python_sources",
    ),
}

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.data.digits import read_digits, require_digits
    from dure.data.idx import IdxSplit, read_idx, read_idx_directory
    from dure.data.images import ImageData, Images, load_digits, load_idx
    from dure.data.loader import DataLoader
    from dure.data.partition import DataPartitioner, Partition
    from dure.data.sampler import DistributedSampler
    from dure.data.text import (
        TextData, Vocabulary, Windows, load_python_sources, read_python_sources,
    )
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
