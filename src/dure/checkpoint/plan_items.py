"""Items and plans, under the names of torch: the parts of a state that a rank writes or reads.

An item is a slice of a tensor, or another value, which planners (`planner`) and storages
(`storage`) pass on as the bytes that `torch.save` makes of it. A plan is a list of items.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from dure.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from dure.checkpoint.slices import Box, full_box, pieces_of
from dure.errors import CheckpointError
from dure.tensor import DTensor

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "ReadItem",
    "SavePlan",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class WriteItemType(Enum):
    """Kinds of items: a full tensor, a slice of a DTensor, a value.

    Example:
        ```python
        from dure.checkpoint.default_planner import create_default_local_save_plan
        from dure.checkpoint.planner import WriteItemType

        (item,) = create_default_local_save_plan({"weight": torch.ones(2)}).items
        assert item.type is WriteItemType.TENSOR
        ```
    """

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """What is read.

    Obtained from:
        `ReadItem.type`.
    """

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The length of a value, if that is known.

    Attributes:
        nbytes: The length.

    Obtained from:
        `WriteItem.bytes_io_data`.
    """

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """A slice, and the full tensor that it is of.

    Attributes:
        chunk: Where the slice begins, and its sizes.
        properties: The dtype in which it is saved.
        size: The full tensor's.

    Obtained from:
        `WriteItem.tensor_data`.
    """

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """One item of a `SavePlan`.

    Attributes:
        index: The name and, of a tensor, where the slice begins.
        type: Whether it is a full tensor, a slice of a DTensor, or a value.
        bytes_io_data: Of a value; None if its length is not known.
        tensor_data: Of a tensor.

    Obtained from:
        `SavePlan.items`.
    """

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the bytes of the full tensor; None: it is a value."""
        data = self.tensor_data
        return None if data is None else math.prod(data.size) * data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One item of a `LoadPlan`: elements of a saved slice, and where in the state they go.

    Attributes:
        type: Whether it is a tensor or a value.
        dest_index: The slice of the state.
        dest_offsets: Where the elements begin in it.
        storage_index: The saved slice.
        storage_offsets: Where the elements begin in it.
        lengths: How many elements, by dimension.

    Obtained from:
        `LoadPlan.items`.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What a rank writes.

    Attributes:
        items: The items.
        storage_data: Data of a custom storage.
        planner_data: Data of the planner; of `DefaultSavePlanner`, the keys that lead to each name.
        usable: Accepted, without effect; torch marks empty plans of its cache.

    Obtained from:
        `SavePlanner.create_local_plan`; `StorageWriter.write_data` receives it.
    """

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True


@dataclass
class LoadPlan:
    """What a rank reads.

    Attributes:
        items: The items.
        storage_data: Data of a custom storage.
        planner_data: Data of the planner.

    Obtained from:
        `LoadPlanner.create_local_plan`; `StorageReader.read_data` receives it.
    """

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


def bytes_of_value(value: Any) -> io.BytesIO:
    """Return what `torch.save` makes of a value."""
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def value_of_bytes(data: io.BytesIO, name: str) -> Any:
    """Return the value of that name.

    Raises:
        CheckpointError: The bytes would run code, or were not made by `torch.save`.
    """
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as e:
        found = re.search(r"GLOBAL (\S+)", str(e))
        raise CheckpointError(
            "a value cannot be loaded without running code",
            seen=f"{name!r}: {found[1] if found else type(e).__name__}",
            fix="Save numbers, strings, bytes, and lists, tuples, sets and dicts of them.",
        ) from e


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return a chunk as a box."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def write_items(name: str, value: Any) -> list[WriteItem]:
    """Return what this rank has of a state's entry: slices of a tensor, or a value."""
    if not isinstance(value, torch.Tensor):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    boxes = [piece.box for piece in pieces_of(name, value)]
    if not value.numel():
        boxes = [full_box(value.shape)]
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    items: list[WriteItem] = []
    for box in boxes:
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        data = TensorWriteData(chunk, TensorProperties(value.dtype), value.shape)
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data))
    return items


def read_items(name: str, saved: TensorStorageMetadata, boxes: Iterable[Box]) -> list[ReadItem]:
    """Return what is read of a saved tensor to fill some boxes of it."""
    items: list[ReadItem] = []
    for here, wanted in enumerate(boxes):
        for number, chunk in enumerate(saved.chunks):
            box = box_of(chunk)
            both = box.meet(wanted)
            if both is not None:
                to, at = both.begin_in(wanted), both.begin_in(box)
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        MetadataIndex(name, torch.Size(wanted.offsets), here),
                        torch.Size(to),
                        MetadataIndex(name, chunk.offsets, number),
                        torch.Size(at),
                        torch.Size(both.sizes),
                    )
                )
    return items
