"""What a checkpoint holds, under torch's names: `Metadata` and its parts.

A view of the manifest for programs that ask: which names, of what shape and dtype, in which chunks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from dure.checkpoint.catalog import HeldManifest
from dure.checkpoint.contents import Catalog
from dure.checkpoint.fsspec_path import AnyPath

__all__ = [
    "STATE_DICT_TYPE",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]


STATE_DICT_TYPE = dict[str, Any]
"""A state, for annotations; torch's name."""


@dataclass
class ChunkStorageMetadata:
    """A slice of a tensor.

    Attributes:
        offsets: Where it begins, by dimension.
        sizes: How many elements, by dimension.

    Obtained from:
        `TensorStorageMetadata.chunks`.

    Example:
        ```python
        from dure.checkpoint.metadata import ChunkStorageMetadata

        second_row = ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([1, 3]))
        ```
    """

    offsets: torch.Size
    sizes: torch.Size


@dataclass
class TensorProperties:
    """Properties of a tensor other than its size. Only `dtype` is stored.

    Example:
        ```python
        from dure.checkpoint.metadata import TensorProperties

        properties = TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.bfloat16))
        assert properties.dtype is torch.bfloat16
        ```
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Describe a tensor."""
        pinned, grad = tensor.is_pinned(), tensor.requires_grad
        return TensorProperties(tensor.dtype, tensor.layout, grad, pin_memory=pinned)


@dataclass
class TensorStorageMetadata:
    """A tensor in the checkpoint.

    Attributes:
        properties: Its dtype.
        size: The full tensor's.
        chunks: Its slices; each element is in one.

    Obtained from:
        `Metadata.state_dict_metadata`.
    """

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """A value in the checkpoint that is no tensor.

    Obtained from:
        `Metadata.state_dict_metadata`.
    """


@dataclass
class StorageMeta:
    """What a storage reports about itself to a planner.

    Obtained from:
        `StorageWriter.storage_meta`; `SavePlanner.set_up_planner` receives it.
    """

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class MetadataIndex:
    """A name, and which slice of that tensor.

    Attributes:
        fqn: The name.
        offset: Where the slice begins; None: a value, or any slice.
        index: The number of the slice in the tensor's `chunks`; not compared.

    Example:
        ```python
        from dure.checkpoint.metadata import MetadataIndex

        index = MetadataIndex("weight", torch.Size([1, 0]))  # the slice that begins in row 1
        assert index == MetadataIndex("weight", torch.Size([1, 0]), index=1)
        ```
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.offset is not None:
            object.__setattr__(self, "offset", torch.Size(self.offset))


@dataclass
class Metadata:
    """What a checkpoint holds.

    Attributes:
        state_dict_metadata: For each name, its metadata.
        planner_data: For each name, the keys that led to it.
        storage_data: Data of a custom storage.
        storage_meta: The same.
        version: The version of the format, of storages that have one.

    Obtained from:
        The method `read_metadata` of a `FileSystemReader`, and `AsyncSaveResponse.result`.

    Example:
        ```python
        from dure import checkpoint

        checkpoint.save({"weight": torch.ones(2, 3)}, checkpoint_id="run/step1")
        metadata = checkpoint.FileSystemReader("run/step1").read_metadata()
        assert metadata.state_dict_metadata["weight"].size == (2, 3)
        ```
    """

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None

    def __getattr__(self, name: str) -> Any:
        """Parse the manifest, if that was left for later (`read_later`)."""
        read = self.__dict__.get("_read")
        if read is None or name not in ("state_dict_metadata", "planner_data"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        # What the program has set stays. Two threads may both read.
        self.__dict__ = read().__dict__ | self.__dict__
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, to be copied or sent; a manifest is read for it."""
        assert self.state_dict_metadata is not None
        return {name: value for name, value in self.__dict__.items() if name != "_read"}


def read_later(folder: AnyPath, digest: bytes) -> Metadata:
    """Return what the manifest of that digest holds, to be parsed when it is looked at.

    So a rank that does not look at it does not hold what all ranks have saved.
    """
    made, held = Metadata.__new__(Metadata), HeldManifest(folder, digest)
    made.__dict__["_read"] = lambda: metadata_of(held.catalog())
    return made


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
            for box in catalog.cut(leaf.value).boxes()
        ]
        properties = TensorProperties(kind.torch_dtype)
        found[name] = TensorStorageMetadata(properties, torch.Size(kind.shape), chunks)
    return Metadata(found, {name: leaf.path for name, leaf in catalog.leaves.items()})
