"""What a checkpoint holds, under torch's names: `Metadata` and its parts.

A view of the manifest for programs that ask: which names, of what shape and dtype, in which chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dure.checkpoint.catalog import Catalog

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "TensorProperties",
    "TensorStorageMetadata",
    "metadata_of",
]


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A slice of a tensor: where it begins, and its sizes."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass(frozen=True)
class TensorProperties:
    """What a tensor is beside its size."""

    dtype: torch.dtype


@dataclass(frozen=True)
class TensorStorageMetadata:
    """A tensor in the checkpoint."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass(frozen=True)
class BytesStorageMetadata:
    """A value in the checkpoint that is no tensor."""


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint holds.

    Attributes:
        state_dict_metadata: For each name, what it is.
        planner_data: For each name, the keys that led to it.
    """

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])


def metadata_of(catalog: Catalog) -> Metadata:
    """Return a manifest under torch's names."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, leaf in catalog.leaves.items():
        kind = catalog.kind_of(name)
        if kind is None:
            found[name] = BytesStorageMetadata()
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in catalog.slices[leaf.value]
        ]
        properties = TensorProperties(kind.torch_dtype)
        found[name] = TensorStorageMetadata(properties, torch.Size(kind.shape), chunks)
    return Metadata(found, {name: leaf.path for name, leaf in catalog.leaves.items()})
