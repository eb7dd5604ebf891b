"""Folders that `torch.distributed.checkpoint` has saved: `.metadata` and `*.distcp`.

`.metadata` is a pickle. It is read by an unpickler that makes the classes of `_CLASSES` and nothing
else, so that it cannot run code. Each stored slice, and each value, is a stream of `torch.save` in
a file, read with `weights_only=True`.

Cost:
    `.metadata` is read by every rank; of the slices only those in which the rank has elements, one
    at a time.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch

from dure.checkpoint.catalog import NAME
from dure.checkpoint.file_systems import open_file
from dure.checkpoint.files import damaged
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dure.checkpoint.plan_items import LoadItemType, LoadPlan, value_of_bytes
from dure.checkpoint.planner import LoadPlanner
from dure.checkpoint.restoring import was_written
from dure.checkpoint.storage import done
from dure.errors import CheckpointError

__all__ = ["TorchFolder", "is_torch_folder"]

_METADATA = ".metadata"
_CANNOT = "torch's checkpoint cannot be read"


def is_torch_folder(folder: AnyPath) -> bool:
    """Return whether a folder has a checkpoint of torch, and none of Dure."""
    return (folder / _METADATA).is_file() and not (folder / NAME).exists()


@dataclass
class _Place:
    """Where a slice or value is: torch's `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


class _Properties(TensorProperties):
    """torch pickles a tuple of the properties; only the dtype matters."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _Ignored:
    """Stands for a class whose objects say nothing that is needed."""

    def __init__(self, *args: object) -> None: ...


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILES_MODULE = "torch.distributed.checkpoint.filesystem"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA_MODULE, "Metadata"): Metadata,
    (_METADATA_MODULE, "MetadataIndex"): MetadataIndex,
    (_METADATA_MODULE, "TensorStorageMetadata"): TensorStorageMetadata,
    (_METADATA_MODULE, "BytesStorageMetadata"): BytesStorageMetadata,
    (_METADATA_MODULE, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_METADATA_MODULE, "StorageMeta"): StorageMeta,
    (_METADATA_MODULE, "TensorProperties"): _Properties,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _Ignored,
    (_OLD_MODULE, "TensorProperties"): _Properties,
    (_OLD_MODULE, "MEM_FORMAT_ENCODING"): _Ignored,
    (_FILES_MODULE, "_StorageInfo"): _Place,
    (_FILES_MODULE, "_StoragePrefix"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
"""What may be in `.metadata`, and what is made of it."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of `_CLASSES`, and torch's dtypes."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class of the list; UnpicklingError for another one."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")


def _fault_of(found: Any) -> str:
    """Return what is wrong with the metadata, as far as this module relies on them; "" if nothing.

    Attributes of an object come from the file, so that any may be missing, or of another type.
    """
    names = getattr(found, "state_dict_metadata", None)
    places = getattr(found, "storage_data", None)
    if not isinstance(found, Metadata) or not isinstance(names, dict):
        return "there is no list of names"
    if not isinstance(places, dict) or not all(map(_is_place, places.values())):
        return "there is no list of stored slices"
    for name, saved in names.items():
        if isinstance(saved, BytesStorageMetadata):
            continue
        dtype = getattr(getattr(saved, "properties", None), "dtype", None)
        chunks, size = getattr(saved, "chunks", None), getattr(saved, "size", None)
        if not isinstance(dtype, torch.dtype) or not isinstance(size, torch.Size):
            return f"{name!r} is neither a tensor nor a value"
        if not isinstance(chunks, list) or not all(_is_chunk(chunk, size) for chunk in chunks):
            return f"the slices of {name!r} are not within it"
    return ""


def _is_place(place: Any) -> bool:
    path, numbers = getattr(place, "relative_path", None), ("offset", "length")
    found = [getattr(place, number, None) for number in numbers]
    return isinstance(path, str) and all(isinstance(n, int) and n >= 0 for n in found)


def _is_chunk(chunk: Any, size: torch.Size) -> bool:
    offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
        return False
    if len(offsets) != len(size) or len(sizes) != len(size):
        return False
    ranges = zip(offsets, sizes, size, strict=True)
    return all(at >= 0 and n >= 0 and at + n <= full for at, n, full in ranges)


class TorchFolder:
    """A checkpoint of torch.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: `.metadata` cannot be read, or has something that could run code.
    """

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        path = folder / _METADATA
        try:
            with closing(open_file(path, follow=True)) as file:
                content = io.BytesIO(file.read(0, file.num_bytes()))
            found = _MetadataUnpickler(content).load()
        except Exception as e:  # of many classes: the bytes may be anything
            raise CheckpointError(_CANNOT, path=str(folder), seen=f"{path}: {e}") from e
        fault = _fault_of(found)
        if fault:
            raise CheckpointError(_CANNOT, path=str(folder), seen=f"{path}: {fault}")
        self.metadata = found
        self._places: dict[MetadataIndex, _Place] = found.storage_data

    def _read(self, index: MetadataIndex) -> io.BytesIO:
        """Return the stream of a slice, or of a value."""
        place = self._places.get(index)
        if place is None:
            raise damaged(self._folder, f"{index.fqn}: the metadata do not say where it is")
        if place.transform_descriptors:
            seen = f"{index.fqn} is stored through {', '.join(place.transform_descriptors)}"
            raise CheckpointError(_CANNOT, path=str(self._folder), seen=seen)
        relative = PurePosixPath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise damaged(self._folder, f"{index.fqn}: {relative} is outside of the folder")
        path = self._folder / relative
        try:
            with closing(open_file(path, follow=True)) as file:
                stream = file.read(place.offset, place.length)
        except (OSError, ValueError) as e:
            raise CheckpointError(_CANNOT, path=str(self._folder), seen=f"{path}: {e}") from e
        if len(stream) != place.length:
            raise damaged(self._folder, f"{relative} ends within {index.fqn}")
        return io.BytesIO(stream)

    def value(self, name: str) -> Any:
        """Return a value.

        Raises:
            CheckpointError: It cannot be read without running code, or not at all.
        """
        return value_of_bytes(self._read(MetadataIndex(name)), name)

    def slice(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Return a stored slice of a tensor.

        Raises:
            CheckpointDamaged: It is not what the metadata say.
            CheckpointError: Its file cannot be read.
        """
        stream = self._read(MetadataIndex(name, chunk.offsets))
        try:
            found = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as e:  # of many classes
            raise damaged(self._folder, f"{name} at {list(chunk.offsets)}: {e}") from e
        saved = self.metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        is_tensor = isinstance(found, torch.Tensor)
        if not is_tensor or found.shape != chunk.sizes or found.dtype != saved.properties.dtype:
            seen = f"{found.dtype}{list(found.shape)}" if is_tensor else f"a {type(found).__name__}"
            said = f"{saved.properties.dtype}{list(chunk.sizes)}"
            raise damaged(self._folder, f"{name} at {list(chunk.offsets)} is {seen}, not {said}")
        return found.detach()

    def fill(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; each stored slice once."""
        last: tuple[MetadataIndex, torch.Tensor] | None = None
        by_slice = sorted(plan.items, key=lambda item: self._order(item.storage_index))
        for item in by_slice:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._read(index))
                continue
            if last is None or last[0] != index:
                assert index.offset is not None
                chunk = self._chunk(index)
                last = index, self.slice(index.fqn, chunk)
            here = last[1]
            for dim, (at, n) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                here = here.narrow(dim, at, n)
            to = planner.resolve_tensor(item)
            to.detach().copy_(here)
            was_written(to)
            planner.commit_tensor(item, to)
        return done(None)

    def _order(self, index: MetadataIndex) -> tuple[str, int]:
        """Return where a slice or value is, so that items of one slice follow each other."""
        place = self._places.get(index)
        return ("", 0) if place is None else (place.relative_path, place.offset)

    def _chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        saved = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        return next(chunk for chunk in saved.chunks if chunk.offsets == index.offset)

    @property
    def paths(self) -> Mapping[str, tuple[Any, ...]]:
        """For each name, the keys that lead to it; ints are places in lists."""
        found = self.metadata.planner_data
        return found if isinstance(found, dict) else {}
