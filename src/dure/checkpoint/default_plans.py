"""What the default planners do, as functions under torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dure.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dure.checkpoint.planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    ReadItem,
    SavePlan,
    box_of,
    read_items,
)
from dure.checkpoint.slices import pieces_of
from dure.errors import UsageError

__all__ = [
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "create_read_items_for_chunk_list",
    "find_state_dict_object",
    "find_tensor_shard",
]


def create_default_local_save_plan(
    state_dict: dict[str, Any], is_coordinator: bool = False
) -> SavePlan:
    """Return an item for each slice and value of this rank; `is_coordinator` changes nothing."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
    return planner.create_local_plan()


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Leave each item to one rank; see `DefaultSavePlanner`. Hints are always rewritten."""
    return DefaultSavePlanner().create_global_plan(all_plans)


def create_default_local_load_plan(
    state_dict: dict[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """Return what this rank reads; a name that is not in the checkpoint raises if `strict`."""
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    planner.set_up_planner(state_dict, metadata)
    return planner.create_local_plan()


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return the plans: ranks read independently."""
    return all_plans


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Return what is read of a tensor to fill some chunks of it."""
    return read_items(fqn, checkpoint_md, [box_of(chunk) for chunk in local_chunks])


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """Return this rank's memory of the slice that begins where `index` says.

    Raises:
        UsageError: This rank has no such slice.
    """
    for piece in pieces_of(index.fqn, tensor):
        if index.offset is None or piece.box.offsets == tuple(index.offset):
            return piece.memory
    raise UsageError("this rank has no such slice of the tensor", seen=f"{index}")


def find_state_dict_object(state_dict: Mapping[str, Any], index: MetadataIndex) -> Any:
    """Return a value of a flat state, or this rank's memory of a slice of a tensor.

    Raises:
        UsageError: There is no such name, or this rank has no such slice.
    """
    if index.fqn not in state_dict:
        raise UsageError("the state has no such name", seen=repr(index.fqn))
    value = state_dict[index.fqn]
    return find_tensor_shard(value, index) if isinstance(value, torch.Tensor) else value
