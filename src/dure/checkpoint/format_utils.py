"""To and from one file of `torch.save`, under torch's names."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.file_storages import absolute
from dure.checkpoint.fsspec_path import path_of
from dure.checkpoint.local_files import flush, rename
from dure.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from dure.checkpoint.objects import few
from dure.checkpoint.plan_items import LoadPlan
from dure.checkpoint.planner import DefaultLoadPlanner, LoadPlanner
from dure.checkpoint.reading import Mapped
from dure.checkpoint.saving import save_into
from dure.checkpoint.storage import CheckpointId, StorageReader, done
from dure.checkpoint.tree import decode, flatten
from dure.comm.collectives import broadcast
from dure.errors import CheckpointError, CheckpointMismatch, UsageError
from dure.trace.plain_files import open_plain

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "read_torch_file",
    "torch_save_to_dcp",
    "write_torch_file",
]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | PathLike[str], torch_save_path: str | PathLike[str]
) -> None:
    """Write a checkpoint as one file of `torch.save`: full tensors, nested as they were saved.

    Args:
        dcp_checkpoint_dir: The checkpoint; of Dure.
        torch_save_path: The file; an existing one is replaced when the new one is on the disk.

    Raises:
        CheckpointDamaged: The checkpoint is damaged.
        CheckpointError: It cannot be read, or the file cannot be written; then what was there
            before is as it was.

    Cost:
        Memory of the tensors that are saved in several slices; others are mapped.

    Example:
        ```python
        from dure import checkpoint
        from dure.checkpoint import format_utils

        checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id="folder")
        if dist.get_rank() == 0:
            format_utils.dcp_to_torch_save("folder", "model.pt")
            assert torch.load("model.pt")["model"]["weight"].tolist() == [1.0, 1.0]
        ```
    """
    folder = path_of(dcp_checkpoint_dir)
    catalog = catalog_of(folder)
    state = decode(catalog.tree, cache(Mapped(folder, catalog).checked))
    write_torch_file(Path(torch_save_path), state)


def write_torch_file(path: Path, state: Any) -> None:
    """Write a file of `torch.save` beside the place of `path`, and rename it.

    Args:
        path: The file. It is complete, or as before, if the process is killed.
        state: What `torch.save` can save.

    Example:
        ```python
        from dure.checkpoint import format_utils

        path = Path(f"rank{dist.get_rank()}.pt")
        format_utils.write_torch_file(path, {"weight": torch.ones(2)})
        ```
    """
    hidden = path.with_name(f".saving-{path.name}.pt")  # torch refuses a name that is a suffix only
    what = "the file was not written"
    try:
        torch.save(state, hidden)
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        rename(hidden, path)
        what = "the file is in place and complete, but it may not be durable: a flush failed"
        flush(path.parent)
    except (OSError, RuntimeError) as e:  # torch raises both when a disk is full
        raise CheckpointError(what, path=str(path), seen=f"{e}") from e
    finally:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)


def torch_save_to_dcp(
    torch_save_path: str | PathLike[str], dcp_checkpoint_dir: str | PathLike[str]
) -> None:
    """Write a file of `torch.save` as a checkpoint, which any mesh loads.

    Args:
        torch_save_path: The file: nested dicts and lists of tensors and values.
        dcp_checkpoint_dir: The folder; made if absent.

    Raises:
        CheckpointError: The file would run code, or is none of torch.
        CheckpointException: Something in it cannot be saved, or not written.

    Cost:
        The file is mapped, and its bytes are read once.

    Example:
        ```python
        from dure.checkpoint.format_utils import torch_save_to_dcp

        folder = Path(f"rank{dist.get_rank()}")
        folder.mkdir(exist_ok=True)
        torch.save({"weight": torch.ones(4)}, folder / "old.pt")
        torch_save_to_dcp(folder / "old.pt", folder / "new")
        ```
    """
    state = read_torch_file(torch_save_path)
    folder = path_of(dcp_checkpoint_dir)
    save_into(folder, state, Ranks(None, alone=True))


def read_torch_file(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the dict that a file of `torch.save` has; its tensors are mapped.

    Args:
        path: The file.

    Returns:
        The dict.

    Raises:
        CheckpointError: The file would run code, is none of torch, or holds no dict.

    Example:
        ```python
        assert format_utils.read_torch_file(path)["weight"].tolist() == [1.0, 1.0]
        ```
    """
    try:
        os.close(open_plain(path))  # torch would wait for a pipe
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as e:  # of many classes
        raise CheckpointError("the file cannot be used", path=str(path), seen=f"{e}") from e
    if not isinstance(state, dict):
        seen = f"a {type(state).__name__}"
        raise CheckpointError("the file holds no dict", path=str(path), seen=seen)
    return cast(dict[str, Any], state)


class BroadcastingTorchSaveReader(StorageReader):
    """A file of `torch.save` that one rank reads, sending full tensors one by one.

    With a `DynamicMetaLoadPlanner`, and for tensors only. Files that would run code are refused.

    Args:
        checkpoint_id: The file.
        coordinator_rank: The rank of the default group that reads it.

    Example:
        ```python
        from dure import checkpoint

        if dist.get_rank() == 0:  # no other rank needs to see the file
            torch.save({"weight": torch.arange(4.0)}, "full.pt")
        state = {"weight": torch.zeros(4)}
        checkpoint.load(
            state,
            storage_reader=format_utils.BroadcastingTorchSaveReader("full.pt"),
            planner=format_utils.DynamicMetaLoadPlanner(),
        )
        assert state["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
        ```
    """

    def __init__(self, checkpoint_id: CheckpointId = None, coordinator_rank: int = 0) -> None:
        self.coordinator_rank = coordinator_rank
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Read another file from now on."""
        self.checkpoint_id = None if checkpoint_id is None else absolute(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return nothing: the planner makes it."""
        return Metadata({})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Send every tensor of the state, of which ranks take what they have.

        Raises:
            CheckpointError: There is no such file, or no such tensor in it; raised on all ranks.

        Collective:
            All ranks of the default group.
        """
        if not isinstance(planner, DynamicMetaLoadPlanner) or self.checkpoint_id is None:
            raise UsageError("a file needs a DynamicMetaLoadPlanner", seen=f"{self.checkpoint_id}")
        ranks = Ranks(None, "BroadcastingTorchSaveReader")
        path, wanted = self.checkpoint_id, planner.state_dict
        leads, leaves = ranks.rank == self.coordinator_rank, dict[str, torch.Tensor]()
        ranks.each(lambda: leaves.update(_tensors(path, wanted)) if leads else None)
        for name, value in wanted.items():
            full = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            if leads:
                full.copy_(leaves[name])
            if ranks.group is not None:
                broadcast(full, group=ranks.group, group_src=self.coordinator_rank)
            for item in plan.items:
                if item.storage_index.fqn == name:
                    to, here = planner.resolve_tensor(item), full
                    for dim, at in enumerate(item.storage_offsets):
                        here = here.narrow(dim, at, item.lengths[dim])
                    to.detach().copy_(here)
                    planner.commit_tensor(item, to)
        return done(None)


def _tensors(path: Any, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: leaf.value for name, leaf in flatten(read_torch_file(path)).items()}
    absent = [n for n, t in wanted.items() if getattr(found.get(n), "shape", None) != t.shape]
    if absent:
        raise CheckpointMismatch("tensors are not so in the file", path=f"{path}", seen=few(absent))
    return found


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Takes for saved what the state has: for storages that know nothing of it beforehand.

    Example:
        ```python
        planner = format_utils.DynamicMetaLoadPlanner()  # see BroadcastingTorchSaveReader
        ```
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, and describe it; UsageError where there is a value in it."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.metadata = Metadata({})
        for name, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise UsageError("only tensors are loaded so", seen=f"{name!r} is a value")
            full = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
            properties = TensorProperties(value.dtype)
            saved = TensorStorageMetadata(properties, value.shape, [full])
            self.metadata.state_dict_metadata[name] = saved
