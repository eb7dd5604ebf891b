"""`save` and `load` under torch's names: any state of tensors, from any mesh into any other.

With Dure's own storages and planners there is one format and one way to plan, which is quick
(`saving`, `restoring`). Others, and subclasses of them, are asked by `planned`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.background import AsyncSaveResponse, background_of, wait_for_saves
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.file_storages import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    folder_of,
)
from dure.checkpoint.fsspec_path import local_path
from dure.checkpoint.metadata import Metadata, metadata_of, read_later
from dure.checkpoint.planned import load_planned, save_planned, taken_of
from dure.checkpoint.planner import DefaultLoadPlanner, DefaultSavePlanner, LoadPlanner, SavePlanner
from dure.checkpoint.restoring import Loaded, load_from
from dure.checkpoint.saving import save_into
from dure.checkpoint.staging import AsyncStager
from dure.checkpoint.storage import StorageReader, StorageWriter
from dure.checkpoint.torch_folder import is_torch_folder
from dure.checkpoint.weight_folder import save_weights
from dure.checkpoint.weight_reading import catalog_of_weights
from dure.comm.profiling import recorded
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "async_save",
    "load",
    "load_state_dict",
    "save",
    "save_state_dict",
]

Where = str | os.PathLike[str]
P = TypeVar("P")
Writer = FileSystemWriter | HuggingFaceStorageWriter | StorageWriter


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_writer: Writer | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state into a folder: each rank writes its slices; common ones are written once.

    A checkpoint that is in the folder is replaced when the new one is complete, and not before.

    Args:
        state_dict: Names to tensors, DTensors, dicts and lists of them, objects with `state_dict`
            and `load_state_dict`, and values (numbers, strings, and what else JSON can be made of).
            What is not sharded is to be equal on all ranks: one rank's is kept.
        checkpoint_id: The folder, a path or a URL of fsspec (`s3://bucket/run`); made if absent.
            All ranks must see the same folder.
        storage_writer: The same; `checkpoint_id` goes before it. A `HuggingFaceStorageWriter` makes
            a folder of weights; a custom `StorageWriter`, its own form.
        planner: A custom one decides what is saved, mostly a subclass of `DefaultSavePlanner`.
        process_group: The ranks that save; None: the default group, or this process alone.
        no_dist: This process alone.
        use_collectives: Only True: the manifest is one.

    Returns:
        What the checkpoint holds, also after later saves into the folder. A manifest of more than
        64 KiB stays open until this is looked at or freed.

    Raises:
        CheckpointException: It failed on some ranks (`failures`: which and why); raised on all.
        UsageError: No folder is given, or an object of another library.

    Collective:
        All ranks of the group must call; two exchanges, or three if ranks have much that the save
        before had not; three more with a custom planner; four with a `StorageWriter`. Returns when
        the checkpoint is on the disk.

    Cost:
        Each byte is read and written once, by one rank; memory: one slice where it is not
        contiguous on the CPU. Ranks send what they have to rank 0, which plans and writes the
        manifest; the others learn what they write.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)
        state = {"model": model, "epoch": 3}
        dist.checkpoint.save(state, checkpoint_id="run/epoch3")

        state = {"model": torch.nn.Linear(4, 2), "epoch": 0}
        dist.checkpoint.load(state, checkpoint_id="run/epoch3")
        assert state["epoch"] == 3
        ```
    """
    if not use_collectives:
        raise UsageError("a checkpoint has one manifest", seen="use_collectives is False")
    ranks = Ranks(process_group, "save", no_dist)
    return _save(state_dict, checkpoint_id, storage_writer, planner, ranks)


@recorded("dure.checkpoint.save")
def _save(
    state_dict: Mapping[str, Any],
    checkpoint_id: Where | None,
    writer: Writer | None,
    planner: SavePlanner | None,
    ranks: Ranks,
    coordinator: int = 0,
) -> Metadata:
    own = _own(planner, SavePlanner, DefaultSavePlanner)
    if isinstance(writer, StorageWriter):
        if checkpoint_id is not None:
            writer.reset(checkpoint_id)
        planner = planner or DefaultSavePlanner()
        return save_planned(state_dict, writer, planner, ranks, coordinator)
    path = folder_of(_where(checkpoint_id, writer), "save")
    wait_for_saves(path)
    state = state_dict if own is None else taken_of(state_dict, own, ranks, coordinator)
    if isinstance(writer, HuggingFaceStorageWriter):
        folder = local_path(path, "a folder of weights that ranks write together")
        files = cast(Mapping[str, int], writer.fqn_to_index_mapping), writer.max_bytes
        return metadata_of(save_weights(folder, state, ranks, *files, writer.overwrite))
    return read_later(path, save_into(path, state, ranks, _may_replace(writer)))


def save_state_dict(
    state_dict: Mapping[str, Any],
    storage_writer: Writer,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save as `save` does; an older name.

    Args:
        state_dict: As for `save`.
        storage_writer: The folder, or a custom storage.
        process_group: The ranks that save; None: the default group, or this process alone.
        coordinator_rank: The rank of the group that divides the plans of a custom planner.
        no_dist: This process alone.
        planner: As for `save`.

    Returns:
        What the checkpoint holds.

    Raises:
        CheckpointException: It failed on some ranks; raised on all.
        UsageError: `storage_writer` or `planner` is of another library.

    Collective:
        As `save`.

    Example:
        ```python
        from dure import checkpoint

        writer = checkpoint.FileSystemWriter("older_name")
        checkpoint.save_state_dict({"weight": torch.ones(2)}, writer)
        assert Path("older_name").is_dir()
        ```
    """
    ranks = Ranks(process_group, "save_state_dict", no_dist)
    return _save(state_dict, None, storage_writer, planner, ranks, coordinator_rank)


class AsyncCheckpointerType(Enum):
    """What writes in the background, under torch's names: a thread, for both.

    Example:
        ```python
        from dure.checkpoint.state_dict_saver import AsyncCheckpointerType

        saving = dist.checkpoint.async_save(
            {"weight": torch.ones(2)},
            checkpoint_id="run/thread",
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        saving.result()
        ```
    """

    THREAD = "thread"
    PROCESS = "process"


@recorded("dure.checkpoint.async_save")
def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_writer: FileSystemWriter | None = None,
    planner: SavePlanner | None = None,
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
        planner: As for `save`.
        process_group: The ranks that save. They get a group of their own for it.
        async_checkpointer_type: Changes nothing: a thread writes, and leaves Python to others.
        async_stager: Holds the snapshot; None: a buffer that is kept for the next save.
        no_dist: This process alone.
        use_collectives: Only True.

    Returns:
        A future of what the checkpoint holds; it is done when that is on the disk. What `save` says
        of its result holds for that of the future.

    Raises:
        CheckpointException: Something cannot be saved; or the save before failed on a rank, and
            it was not waited for.
        UsageError: As `save`.

    Collective:
        All ranks of the group must call; two or three exchanges, and the first time a new group.
        Waits for the save before.

    Cost:
        One copy of the bytes that this rank writes, which are as many bytes of memory, kept.

    Example:
        ```python
        weight = torch.ones(4)
        saving = dist.checkpoint.async_save({"weight": weight}, checkpoint_id="run/background")
        weight.zero_()  # what is saved are ones
        saving.result()
        ```
    """
    del async_checkpointer_type
    if not use_collectives:
        raise UsageError("a checkpoint has one manifest", seen="use_collectives is False")
    replace, own = _may_replace(storage_writer), _own(planner, SavePlanner, DefaultSavePlanner)
    if async_stager is not None:
        own_hold = getattr(type(async_stager), "hold", AsyncStager.hold)
        if own_hold is AsyncStager.hold:
            raise UsageError(
                "a stager copies with hold(), which this one has not",
                seen=f"async_stager={type(async_stager).__qualname__}",
                fix="Define hold(memory), which returns copies of a dict of tensors, or derive "
                "from BlockingAsyncStager.",
            )
    path = folder_of(_where(checkpoint_id, storage_writer), "async_save")
    saves = background_of(Ranks(process_group, "async_save", no_dist))
    return saves.save(path, state_dict, replace, async_stager, own)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: Where | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Loaded:
    """Load a checkpoint into a state, in place: tensors keep their memory, mesh and placements.

    Args:
        state_dict: As for `save`; it may be of another mesh, other placements or another world, and
            it may be less than what was saved. Tensors keep their dtype: elements are converted.
            Tensors on the meta device are replaced by loaded ones; those of a module are refused.
        checkpoint_id: The folder, a path or a URL of fsspec; also one that
            `torch.distributed.checkpoint` has saved.
        storage_reader: The same; `checkpoint_id` goes before it. A `HuggingFaceStorageReader` reads
            a folder of weights; a custom `StorageReader`, its own form.
        planner: `DefaultLoadPlanner(allow_partial_load=True)` leaves missing entries alone; a
            custom one decides what is loaded to where.
        process_group: The ranks that load; None: the default group, or this process alone.
        no_dist: This process alone.

    Returns:
        Names that are missing in the checkpoint, names that it has besides, bytes that were read;
        nothing of it with a custom planner or reader.

    Raises:
        CheckpointException: It failed on some ranks (`failures`: which and why); raised on all.
            Where names or shapes differ nothing is changed; where a file is damaged, tensors that
            were read before have new values.
        UsageError: No folder is given, or an object of another library.

    Collective:
        All ranks of the group must call; two exchanges, three with a custom planner or reader.

    Cost:
        A rank reads the bytes of the elements that it has, into the memory where they belong.
        Slices that are read completely are compared with their checksum.

    Example:
        ```python
        dist.checkpoint.save({"weight": torch.arange(4.0)}, checkpoint_id="run/weights")
        state = {"weight": torch.zeros(4, dtype=torch.float64)}
        dist.checkpoint.load(state, checkpoint_id="run/weights")
        assert state["weight"].tolist() == [0, 1, 2, 3]
        ```
    """
    ranks = Ranks(process_group, "load", no_dist)
    return _load(state_dict, checkpoint_id, storage_reader, planner, ranks)


@recorded("dure.checkpoint.load")
def _load(
    state_dict: MutableMapping[str, Any],
    checkpoint_id: Where | None,
    reader: StorageReader | None,
    planner: LoadPlanner | None,
    ranks: Ranks,
    coordinator: int = 0,
) -> Loaded:
    own = _own(planner, LoadPlanner, DefaultLoadPlanner)
    if own is None and type(reader) in (NoneType, FileSystemReader, HuggingFaceStorageReader):
        partial = isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load
        path = folder_of(_where(checkpoint_id, reader), "load")
        weights = isinstance(reader, HuggingFaceStorageReader)
        if weights or not is_torch_folder(path):
            reading = catalog_of_weights if weights else catalog_of
            return load_from(path, state_dict, ranks, partial, reading)
    if reader is None:
        reader = FileSystemReader(folder_of(checkpoint_id, "load"))
    elif checkpoint_id is not None:
        reader.reset(checkpoint_id)
    load_planned(state_dict, reader, planner or DefaultLoadPlanner(), ranks, coordinator)
    return Loaded([], [], 0)


def load_state_dict(
    state_dict: MutableMapping[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> Loaded:
    """Load as `load` does; an older name.

    Args:
        state_dict: As for `load`.
        storage_reader: The folder, or a custom storage.
        process_group: The ranks that load; None: the default group, or this process alone.
        coordinator_rank: The rank of the group that passes on the plans of a custom planner.
        no_dist: This process alone.
        planner: As for `load`.

    Returns:
        As `load`.

    Raises:
        CheckpointException: It failed on some ranks; raised on all.
        UsageError: `planner` is of another library.

    Collective:
        As `load`.

    Example:
        ```python
        state = {"weight": torch.zeros(2)}
        checkpoint.load_state_dict(state, checkpoint.FileSystemReader("older_name"))
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """
    ranks = Ranks(process_group, "load_state_dict", no_dist)
    return _load(state_dict, None, storage_reader, planner, ranks, coordinator_rank)


def _may_replace(writer: Any) -> bool:
    """Return whether an existing checkpoint may be replaced; UsageError: it is no folder."""
    if not isinstance(writer, FileSystemWriter | None):
        seen = f"a {type(writer).__module__}.{type(writer).__qualname__}"
        raise UsageError("a folder is written by a FileSystemWriter of dure.checkpoint", seen=seen)
    return writer is None or writer.overwrite


def _own(planner: Any, kind: type[P], default: type[P]) -> P | None:
    """Return a planner that is to be asked; None: it is Dure's own, which says nothing else.

    Raises:
        UsageError: It is none of this library.
    """
    if not isinstance(planner, kind | None):
        seen = f"a {type(planner).__module__}.{type(planner).__qualname__}"
        raise UsageError(f"a planner is a {kind.__name__} of dure.checkpoint", seen=seen)
    return None if type(planner) in (NoneType, default) else planner


def _where(checkpoint_id: Where | None, storage: Any) -> Where | None:
    return storage.path if checkpoint_id is None and storage is not None else checkpoint_id
