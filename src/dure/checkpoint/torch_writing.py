"""Writes a folder that `torch.distributed.checkpoint` loads, with torch's own writer.

torch's `save` asks a planner for what to write, and for the data of one item after the other: here
for the slices of a `Taken`, so that one slice at a time is in memory.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch

from dure.checkpoint.saving import Taken
from dure.checkpoint.slice_files import Slice
from dure.checkpoint.slices import Box, full_box
from dure.checkpoint.tree import Index, Leaf, Named
from dure.errors import CheckpointError

__all__ = ["write_torch_folder"]


def write_torch_folder(folder: Path, taken: Taken, leaves: dict[str, Leaf]) -> None:
    """Write a checkpoint into a folder that has none.

    Args:
        folder: The folder; made if absent.
        taken: The tensors.
        leaves: Tensors, as `Named`, and values, by name.

    Raises:
        CheckpointError: It cannot be written. torch writes `.metadata` last, so that the folder has
            no checkpoint then.
    """
    # lazy: torch's checkpoints take a second to import, and only this needs them
    from torch.distributed.checkpoint import api, filesystem, state_dict_saver

    planner: Any = _SlicePlanner(taken, leaves)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = filesystem.FileSystemWriter(folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_saver.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except (OSError, api.CheckpointException) as e:
        what = "the checkpoint was not written"
        raise CheckpointError(what, path=str(folder), seen=f"{e}") from e


class _SlicePlanner:
    """Plans and resolves slices, as torch's `SavePlanner`, whose module is not imported for it.

    Args:
        taken: The tensors.
        leaves: Tensors, as `Named`, and values, by name.
    """

    def __init__(self, taken: Taken, leaves: dict[str, Leaf]) -> None:
        self._taken, self._leaves = taken, leaves
        self._paths = {name: _keys(leaf.path) for name, leaf in leaves.items()}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: all is known."""

    def create_local_plan(self) -> Any:
        """Return the plan of all slices and values."""
        from torch.distributed.checkpoint import planner  # lazy: as above

        items = [item for name, leaf in self._leaves.items() for item in self._items(name, leaf)]
        return planner.SavePlan(items, planner_data=self._paths)

    def _items(self, name: str, leaf: Leaf) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner  # lazy: as above

        if not isinstance(leaf.value, Named):
            return [planner.WriteItem(metadata.MetadataIndex(name), planner.WriteItemType.BYTE_IO)]
        kind, boxes, _ = self._taken.offer[leaf.value]
        boxes = boxes or (full_box(kind.shape),)
        in_one = boxes == (full_box(kind.shape),)
        size = torch.Size(kind.shape)
        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, torch.Size(box.offsets)),
                planner.WriteItemType.TENSOR if in_one else planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    metadata.TensorProperties(kind.torch_dtype),
                    size,
                ),
            )
            for box in boxes
        ]

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        """Return torch's own division of the plans, with the paths of this state."""
        from torch.distributed.checkpoint import default_planner  # lazy: as above

        plans, about = default_planner.create_default_global_save_plan(all_plans)
        about.planner_data = self._paths
        return plans, about

    def finish_plan(self, new_plan: Any) -> Any:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: Any) -> Any:
        """Return the tensor of a slice, or the bytes of a value."""
        value = self._leaves[write_item.index.fqn].value
        if not isinstance(value, Named):
            made = io.BytesIO()
            torch.save(value, made)
            return made
        chunk = write_item.tensor_data.chunk
        kind, box = self._taken.offer[value][0], Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if not box.num_elements:
            return torch.empty(box.sizes, dtype=kind.torch_dtype, device="cpu")
        return self._taken.memory[Slice(value, box)]


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return keys as torch's: ints are places in lists, keys of dicts are strings."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)
