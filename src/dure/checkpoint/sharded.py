"""`save` and `load` under torch's names: any state of tensors, from any mesh into any other.

The storage and planner classes are torch's in name and carry their options; there is one format and
one way to plan, so they have no methods to override, and objects of other classes are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.background import AsyncSaveResponse, background_of
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.metadata import Metadata, metadata_of
from dure.checkpoint.restoring import Loaded, load_from
from dure.checkpoint.saving import save_into
from dure.checkpoint.staging import AsyncStager
from dure.checkpoint.weight_folder import MAX_FILE_BYTES, catalog_of_weights, save_weights
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "async_save",
    "load",
    "save",
]

Where = str | os.PathLike[str]


@dataclass(frozen=True)
class FileSystemWriter:
    """The folder that `save` writes to.

    A rank writes one file, in one thread and without copies, and flushes it: the other arguments of
    torch's class are taken, and change nothing.

    Args:
        path: The folder; made if absent.
        overwrite: Whether a checkpoint that is there may be replaced.
    """

    path: Where
    single_file_per_rank: bool = True
    sync_files: bool = True
    thread_count: int = 1
    per_thread_copy_ahead: int = 10_000_000
    cache_staged_state_dict: bool = False
    overwrite: bool = True


@dataclass(frozen=True)
class FileSystemReader:
    """The folder that `load` reads.

    Args:
        path: The folder.
    """

    path: Where

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds; reads and checks the manifest, no other file.

        Raises:
            CheckpointError: There is no checkpoint, or its manifest is damaged or lies.
        """
        return metadata_of(catalog_of(_folder(self.path, None, "read_metadata")))


@dataclass(frozen=True)
class HuggingFaceStorageWriter:
    """A folder of weights as Hugging Face has them, that `save` writes: tensors only.

    Every rank writes what it has to its place in the files; no rank holds the whole.

    Args:
        path: The folder; made if absent.
        fqn_to_index_mapping: The number of some tensors' files, from 1 on, by name.
        max_bytes: How large a file of the others gets.
    """

    path: Where
    fqn_to_index_mapping: Mapping[str, int] = field(default_factory=dict[str, int])
    max_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True)
class HuggingFaceStorageReader:
    """A folder of weights as Hugging Face has them, that `load` reads; not checked by sums.

    Args:
        path: The folder, with an index or without; its files may be links.
    """

    path: Where

    def read_metadata(self) -> Metadata:
        """Return what the folder holds; reads the index and the files' headers.

        Raises:
            CheckpointError: There are no weights, or a file is not what it says.
        """
        return metadata_of(catalog_of_weights(_folder(self.path, None, "read_metadata")))


@dataclass(frozen=True)
class DefaultSavePlanner:
    """How `save` plans: what ranks share is written once, spread over them; plans are kept.

    torch's arguments are taken, and change nothing; names are always those of the flat state.

    Raises:
        UsageError: `flatten_state_dict` is False.
    """

    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    dedup_replicated_tensors: bool | None = None
    dedup_save_to_lowest_rank: bool = False
    enable_plan_caching: bool = False

    def __post_init__(self) -> None:
        _need_flat(self.flatten_state_dict)


@dataclass(frozen=True)
class DefaultLoadPlanner:
    """How `load` plans.

    Args:
        flatten_state_dict: Only True.
        flatten_sharded_tensors: Changes nothing.
        allow_partial_load: Leave what is not in the checkpoint as it is, instead of raising.

    Raises:
        UsageError: `flatten_state_dict` is False.
    """

    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    allow_partial_load: bool = False

    def __post_init__(self) -> None:
        _need_flat(self.flatten_state_dict)


def _need_flat(flatten: bool) -> None:
    if not flatten:
        raise UsageError("a checkpoint has flat names", seen="flatten_state_dict is False")


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_writer: FileSystemWriter | HuggingFaceStorageWriter | None = None,
    planner: DefaultSavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state into a folder: each rank writes its slices, what several have is written once.

    A checkpoint that is in the folder is replaced when the new one is whole, and not before.

    Args:
        state_dict: Names to tensors, DTensors, dicts and lists of them, objects with `state_dict`
            and `load_state_dict`, and values (numbers, strings, and what else JSON can be made of).
            What is not sharded is to be equal on all ranks: one rank's is kept.
        checkpoint_id: The folder; made if absent. All ranks must see the same folder.
        storage_writer: The same; `checkpoint_id` goes before it. A `HuggingFaceStorageWriter` makes
            a folder of weights.
        planner: Changes nothing.
        process_group: The ranks that save; None: the default group, or this process alone.
        no_dist: This process alone.
        use_collectives: Only True: the manifest is one.

    Returns:
        What the checkpoint holds.

    Raises:
        CheckpointException: It failed on some ranks (`failures`: which and why); raised on all.
        UsageError: No folder is given, or an object of another library.

    Collective: all ranks of the group must call; three exchanges. Returns when the checkpoint is on
    the disk.

    Cost: each byte is read and written once, by one rank; memory: one slice where it is not
    contiguous on the CPU.
    """
    ranks = Ranks(process_group, "save", no_dist)
    if isinstance(storage_writer, HuggingFaceStorageWriter):
        path = _folder(checkpoint_id, storage_writer, "save")
        numbers, max_bytes = storage_writer.fqn_to_index_mapping, storage_writer.max_bytes
        save_weights(path, state_dict, ranks, numbers, max_bytes)
        return metadata_of(catalog_of_weights(path))
    path, replace = _target("save", checkpoint_id, storage_writer, planner, use_collectives)
    return metadata_of(save_into(path, state_dict, ranks, replace))


class AsyncCheckpointerType(Enum):
    """What writes in the background, under torch's names: a thread, for both."""

    THREAD = "thread"
    PROCESS = "process"


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_writer: FileSystemWriter | None = None,
    planner: DefaultSavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> AsyncSaveResponse:
    """Save a state as `save` does, in the background: return when the state may be changed.

    Args:
        state_dict: As for `save`, and the next five.
        checkpoint_id: The folder.
        storage_writer: The same.
        planner: Changes nothing.
        process_group: The ranks that save. They get a group of their own for it.
        async_checkpointer_type: Changes nothing: a thread writes, and leaves Python to others.
        async_stager: What holds the snapshot; None: a buffer that is kept for the next save.
        no_dist: This process alone.
        use_collectives: Only True.

    Returns:
        A future of what the checkpoint holds; it is done when that is on the disk.

    Raises:
        CheckpointException: Something cannot be saved; or the save before failed on a rank, and
            nobody saw it at its future.
        UsageError: As `save`.

    Collective: all ranks of the group must call; two exchanges, and the first time a new group.
    Waits for the save before.

    Cost: one copy of the bytes that this rank writes, which are as many bytes of memory, kept.
    """
    del async_checkpointer_type
    path, replace = _target("async_save", checkpoint_id, storage_writer, planner, use_collectives)
    saves = background_of(Ranks(process_group, "async_save", no_dist))
    return saves.save(path, state_dict, replace, async_stager)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_reader: FileSystemReader | HuggingFaceStorageReader | None = None,
    planner: DefaultLoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Loaded:
    """Load a checkpoint into a state, in place: tensors keep their memory, mesh and placements.

    Args:
        state_dict: As for `save`; it may be of another mesh, other placements or another world, and
            it may be less than what was saved. Tensors keep their dtype: elements are converted.
        checkpoint_id: The folder.
        storage_reader: The same; `checkpoint_id` goes before it. A `HuggingFaceStorageReader` reads
            a folder of weights.
        planner: `DefaultLoadPlanner(allow_partial_load=True)` leaves alone what is not there.
        process_group: The ranks that load; None: the default group, or this process alone.
        no_dist: This process alone.

    Returns:
        Names that are missing in the checkpoint, names that it has besides, bytes that were read.

    Raises:
        CheckpointException: It failed on some ranks (`failures`: which and why); raised on all.
            Where names or shapes differ nothing is changed; where a file is damaged, tensors that
            were read before have new values.
        UsageError: No folder is given, or an object of another library.

    Collective: all ranks of the group must call; two exchanges.

    Cost: a rank reads the bytes of the elements that it has, into the memory where they belong.
    Slices that are read whole are compared with their checksum.
    """
    planner = _need(planner, DefaultLoadPlanner, "load")
    partial = planner is not None and planner.allow_partial_load
    ranks = Ranks(process_group, "load", no_dist)
    if isinstance(storage_reader, HuggingFaceStorageReader):
        path = _folder(checkpoint_id, storage_reader, "load")
        return load_from(path, state_dict, ranks, partial, catalog_of_weights)
    path = _folder(checkpoint_id, _need(storage_reader, FileSystemReader, "load"), "load")
    return load_from(path, state_dict, ranks, partial)


def _target(
    op: str, checkpoint_id: Where | None, writer: Any, planner: Any, use_collectives: bool
) -> tuple[Path, bool]:
    """Return the folder to save into, and whether what is there may be replaced."""
    _need(planner, DefaultSavePlanner, op)
    if not use_collectives:
        raise UsageError("a checkpoint has one manifest", seen="use_collectives is False")
    _need(writer, FileSystemWriter, op)
    return _folder(checkpoint_id, writer, op), writer is None or writer.overwrite


def _need(given: Any, kind: type[Any], op: str) -> Any:
    """Return an object of a class of this file, or None.

    Raises:
        UsageError: It is of another class, whose methods would not be called.
    """
    if given is not None and type(given) is not kind:
        raise UsageError(
            f"{op} takes a {kind.__name__} of dure.checkpoint",
            seen=f"a {type(given).__module__}.{type(given).__qualname__}",
        )
    return given


def _folder(where: Any, storage: Any, op: str) -> Path:
    if where is None and storage is not None:
        where = storage.path
    if where is None:
        raise UsageError(f"{op} needs a folder", fix="Give it as checkpoint_id.")
    if "://" in os.fspath(where):
        raise UsageError("a checkpoint is in a folder, not at a URL", seen=f"{where}")
    return Path(where)
