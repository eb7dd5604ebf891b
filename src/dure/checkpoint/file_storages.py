"""Where `save` and `load` find a checkpoint: its folder, or a folder of weights.

Readers are storages whose items a custom planner may take, as `load` does with its own.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.contents import Catalog
from dure.checkpoint.fsspec_path import AnyPath, absolute, path_of
from dure.checkpoint.metadata import Metadata, metadata_of
from dure.checkpoint.plan_items import LoadItemType, LoadPlan, ReadItem, bytes_of_value
from dure.checkpoint.planner import LoadPlanner
from dure.checkpoint.reading import Mapped
from dure.checkpoint.restoring import Read, read_slices, reads_of, was_written
from dure.checkpoint.slices import Box, Piece
from dure.checkpoint.storage import CheckpointId, StorageReader, done
from dure.checkpoint.torch_folder import TorchFolder, is_torch_folder
from dure.checkpoint.weight_folder import MAX_FILE_BYTES
from dure.checkpoint.weight_reading import catalog_of_weights
from dure.errors import CheckpointMismatch, UsageError

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "SerializationFormat",
    "folder_of",
]

Where = str | os.PathLike[str]


def folder_of(where: Where | None, op: str) -> AnyPath:
    """Return a folder's absolute path, or its path in a store; UsageError if there is none."""
    if where is None:
        raise UsageError(f"{op} needs a folder", fix="Give it as checkpoint_id.")
    return path_of(where)


def _can_be_folder(where: Where) -> bool:
    """Return whether a path or URL can be used on this machine."""
    try:
        path_of(where)
    except (UsageError, OSError):
        return False
    return True


class SerializationFormat(Enum):
    """torch's formats of a writer's files. A `FileSystemWriter` has one of its own.

    Example:
        ```python
        from dure import checkpoint
        from dure.checkpoint.filesystem import SerializationFormat

        writer = checkpoint.FileSystemWriter(
            "run/step0", serialization_format=SerializationFormat.TORCH_SAVE
        )
        ```
    """

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class FileSystemWriter:
    """The folder that `save` writes to.

    A rank writes one file, in one thread and without copies, and flushes it.

    Args:
        path: The folder; made if absent.
        single_file_per_rank: No effect; torch's argument.
        sync_files: No effect; files are always flushed.
        thread_count: No effect.
        per_thread_copy_ahead: No effect.
        cache_staged_state_dict: No effect.
        overwrite: Whether an existing checkpoint may be replaced.
        _extensions: Only None.
        serialization_format: Only `TORCH_SAVE`; the format of the files is Dure's own.

    Raises:
        UsageError: `_extensions` are given, or the format is `SAFETENSORS`.

    Example:
        ```python
        writer = checkpoint.FileSystemWriter("run/step1", overwrite=False)
        checkpoint.save({"weight": torch.ones(2)}, storage_writer=writer)
        ```
    """

    path: Where
    single_file_per_rank: bool = True
    sync_files: bool = True
    thread_count: int = 1
    per_thread_copy_ahead: int = 10_000_000
    cache_staged_state_dict: bool = False
    overwrite: bool = True
    _extensions: Sequence[object] | None = None
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))
        if self._extensions:
            raise UsageError(
                "FileSystemWriter does not transform what it writes", seen="_extensions="
            )
        if self.serialization_format is SerializationFormat.SAFETENSORS:
            raise UsageError(
                "FileSystemWriter writes a checkpoint's own format",
                seen="serialization_format=SerializationFormat.SAFETENSORS",
                fix="Use HuggingFaceStorageWriter, which writes files of safetensors.",
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Return whether it can be a folder.

        Args:
            checkpoint_id: A path, or a URL.
        """
        return _can_be_folder(checkpoint_id)


@dataclass(frozen=True)
class HuggingFaceStorageWriter:
    """A folder of weights as Hugging Face has them, that `save` writes: tensors only.

    Every rank writes its slices to their place in the files; no rank holds all of them.

    Args:
        path: The folder; made if absent.
        fqn_to_index_mapping: The number of some tensors' files, from 1 on, by name.
        thread_count: No effect; a rank writes in one thread.
        save_distributed: No effect; every rank writes its slices.
        enable_consolidation: No effect; the files are complete tensors.
        thread_count_consolidation: No effect.
        max_bytes: How large a file of the others gets.
        overwrite: Whether weights may be replaced that Dure did not write and no index names, or
            whose index cannot be used. Weights that Dure wrote, or an index names, are replaced in
            any case; other files are never touched.

    Example:
        ```python
        writer = checkpoint.HuggingFaceStorageWriter("weights")
        checkpoint.save({"weight": torch.ones(2)}, storage_writer=writer)
        ```
    """

    path: Where
    fqn_to_index_mapping: Mapping[str, int] | None = None
    thread_count: int = 1
    save_distributed: bool = False
    enable_consolidation: bool = False
    thread_count_consolidation: int = 1
    _: KW_ONLY
    max_bytes: int = MAX_FILE_BYTES
    overwrite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))
        object.__setattr__(self, "fqn_to_index_mapping", dict(self.fqn_to_index_mapping or {}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Return whether it can be a folder.

        Args:
            checkpoint_id: A path, or a URL.
        """
        return "://" not in os.fspath(checkpoint_id)


class FolderReader(StorageReader):
    """What reads items of the files of slices in a folder.

    Args:
        path: The folder.
    """

    def __init__(self, path: Where) -> None:
        self.path = absolute(path)
        self.catalog = Catalog(Path(self.path), {}, {}, [], {})

    @abstractmethod
    def read_catalog(self, folder: AnyPath) -> Catalog:
        """Return what is in the folder; CheckpointError where that cannot be used."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Return whether it can be a folder.

        Args:
            checkpoint_id: A path, or a URL.
        """
        return _can_be_folder(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Read another folder from now on."""
        self.path = self.path if checkpoint_id is None else absolute(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the folder holds; reads the manifest, or the index and the files' headers.

        Raises:
            CheckpointError: There is nothing, or it is damaged or lies.
        """
        self.catalog = self.read_catalog(folder_of(self.path, "read_metadata"))
        return metadata_of(self.catalog)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read items; slices that are read completely are compared with their checksum."""
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.catalog.leaves[item.storage_index.fqn].value
                planner.load_bytes(item, bytes_of_value(value))
            else:
                targets.append((item, planner.resolve_tensor(item)))
        self.fill([(_box_of(i), i.storage_index.fqn, to.detach()) for i, to in targets])
        for item, to in targets:
            was_written(to)
            planner.commit_tensor(item, to)
        return done(None)

    def fill(
        self, wanted: list[tuple[Box, str, torch.Tensor]], mapped: Mapped | None = None
    ) -> None:
        """Read elements; of several calls with one `mapped`, only the first compares a file."""
        reads: list[Read] = []
        for box, name, to in wanted:
            reads += reads_of(self.catalog, self.catalog.leaves[name].value, Piece(box, to))
        read_slices(folder_of(self.path, "load"), self.catalog, reads, 1, mapped)


def _box_of(item: ReadItem) -> Box:
    """Return what an item reads, as indices in the full tensor."""
    begin = item.storage_index.offset or [0] * len(item.lengths)
    at = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
    return Box(at, tuple(item.lengths))


class FileSystemReader(FolderReader):
    """The folder that `load` reads: a checkpoint of Dure, or of `torch.distributed.checkpoint`.

    Args:
        path: The folder.

    Example:
        ```python
        state = {"weight": torch.zeros(2)}
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader("run/step1"))
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """

    _theirs: TorchFolder | None = None

    def read_catalog(self, folder: AnyPath) -> Catalog:
        """Return the manifest."""
        return catalog_of(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the folder holds; reads the manifest, or torch's `.metadata`.

        Raises:
            CheckpointError: There is nothing, or it is damaged or lies.
        """
        folder = folder_of(self.path, "read_metadata")
        self._theirs = TorchFolder(folder) if is_torch_folder(folder) else None
        return super().read_metadata() if self._theirs is None else self._theirs.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read items; slices of Dure that are read completely are compared with their checksum."""
        if self._theirs is None:
            return super().read_data(plan, planner)
        return self._theirs.fill(plan, planner)


class HuggingFaceStorageReader(FolderReader):
    """A folder of weights as Hugging Face has them, that `load` reads.

    If Dure wrote them, slices that are read completely are compared with their checksums.

    Args:
        path: The folder, with an index or without; its files may be links.
        thread_count: No effect.

    Example:
        ```python
        state = {"weight": torch.zeros(2)}
        checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader("weights"))
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """

    def __init__(self, path: Where, thread_count: int = 1) -> None:
        super().__init__(path)
        self.thread_count = thread_count

    def read_catalog(self, folder: AnyPath) -> Catalog:
        """Return what the files' headers say."""
        return catalog_of_weights(folder)


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """The same, with weights that are scaled in blocks: those of which there is a `_scale_inv`.

    A weight [rows, columns], mostly of 8-bit floats, has one scale for each block, by which its
    elements are multiplied. A rank reads the scales of the elements that it has.

    Args:
        path: The folder.
        thread_count: No effect.
        target_dtype: Products are rounded to it, then converted to the target's dtype.
        block_size: Rows, and columns, of a block.

    Example:
        ```python
        reader = checkpoint.QuantizedHuggingFaceStorageReader("weights", block_size=128)
        state = {"weight": torch.zeros(2)}
        checkpoint.load(state, storage_reader=reader)  # these weights have no scales
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """

    def __init__(
        self,
        path: Where,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        super().__init__(path, thread_count)
        self.target_dtype, self.block_size = target_dtype, block_size

    def fill(
        self, wanted: list[tuple[Box, str, torch.Tensor]], mapped: Mapped | None = None
    ) -> None:
        """Read elements, and multiply them."""
        mapped = mapped or Mapped(folder_of(self.path, "load"), self.catalog)
        scaled = [one for one in wanted if f"{one[1]}_scale_inv" in self.catalog.leaves]
        plain = [one for one in wanted if f"{one[1]}_scale_inv" not in self.catalog.leaves]
        super().fill(plain, mapped)
        for box, name, to in scaled:
            kind, scales = self.catalog.kinds[name], self.catalog.kinds[f"{name}_scale_inv"]
            size = self.block_size
            if len(kind.shape) != 2 or scales.shape != tuple(-(-n // size) for n in kind.shape):
                seen = f"{scales} for {name}, {kind}"
                raise CheckpointMismatch(f"scales are not of blocks of {size}", seen=seen)
            first = tuple(at // size for at in box.offsets)
            last = tuple((end - 1) // size for end in box.ends)
            blocks = Box(first, tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
            weight = torch.empty(box.sizes, dtype=kind.torch_dtype, device="cpu")
            scale = torch.empty(blocks.sizes, device="cpu")
            super().fill([(box, name, weight), (blocks, f"{name}_scale_inv", scale)], mapped)
            rows, columns = (
                torch.arange(a, a + n, device="cpu") // size - b
                for a, n, b in zip(box.offsets, box.sizes, first, strict=True)
            )
            to.copy_((weight.float() * scale[rows[:, None], columns]).to(self.target_dtype))
