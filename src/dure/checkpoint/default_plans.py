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
from dure.checkpoint.plan_items import LoadPlan, ReadItem, SavePlan, box_of, read_items
from dure.checkpoint.planner import DefaultLoadPlanner, DefaultSavePlanner
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
    """Return an item for each slice and value of this rank; `is_coordinator` changes nothing.

    Args:
        state_dict: A state of one level: tensors and other values by name.
        is_coordinator: No effect.

    Returns:
        The plan of this rank.

    Example:
        ```python
        from dure.checkpoint import default_planner

        weight = torch.arange(6.0).reshape(2, 3)
        plan = default_planner.create_default_local_save_plan({"weight": weight, "epoch": 1})
        assert [item.index.fqn for item in plan.items] == ["weight", "epoch"]
        ```
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
    return planner.create_local_plan()


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Leave each item to one rank; see `DefaultSavePlanner`. Hints are always rewritten.

    Args:
        all_plans: The plans of all ranks.
        rewrite_index_hints: No effect.

    Returns:
        The plans without the items that another rank writes, and the metadata of the checkpoint.

    Example:
        ```python
        plans, metadata = default_planner.create_default_global_save_plan([plan])
        assert metadata.state_dict_metadata["weight"].size == (2, 3)
        ```
    """
    return DefaultSavePlanner().create_global_plan(all_plans)


def create_default_local_load_plan(
    state_dict: dict[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """Return what this rank reads; a name that is not in the checkpoint raises if `strict`.

    Args:
        state_dict: The state to load into, of one level.
        metadata: The metadata of the checkpoint.
        strict: Whether a name that is not in the checkpoint is an error.

    Returns:
        The plan of this rank.

    Raises:
        CheckpointMismatch: A name is not in the checkpoint, or a size differs.

    Example:
        ```python
        state = {"weight": torch.zeros(2, 3)}
        loading = default_planner.create_default_local_load_plan(state, metadata)
        assert [item.dest_index.fqn for item in loading.items] == ["weight"]
        ```
    """
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    planner.set_up_planner(state_dict, metadata)
    return planner.create_local_plan()


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return the plans: ranks read independently.

    Args:
        all_plans: The plans of all ranks.

    Returns:
        The same plans.

    Example:
        ```python
        assert default_planner.create_default_global_load_plan([loading]) == [loading]
        ```
    """
    return all_plans


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Return what is read of a tensor to fill some chunks of it.

    Args:
        fqn: The name of the tensor.
        checkpoint_md: The metadata of the tensor.
        local_chunks: The slices to fill.

    Returns:
        An item for each pair of a saved slice and a slice to fill that overlap.

    Example:
        ```python
        from dure.checkpoint.metadata import ChunkStorageMetadata
        from dure.checkpoint.planner_helpers import create_read_items_for_chunk_list

        row = ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([1, 3]))
        saved = metadata.state_dict_metadata["weight"]
        (item,) = create_read_items_for_chunk_list("weight", saved, [row])
        assert item.storage_offsets == (1, 0) and item.lengths == (1, 3)
        ```
    """
    return read_items(fqn, checkpoint_md, [box_of(chunk) for chunk in local_chunks])


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """Return this rank's memory of the slice that begins where `index` says.

    Args:
        tensor: A tensor or a DTensor.
        index: The name and the offset of the slice.

    Returns:
        The memory of the slice.

    Raises:
        UsageError: This rank has no such slice.

    Example:
        ```python
        from dure.checkpoint import utils

        index = plan.items[0].index  # the full tensor
        assert torch.equal(utils.find_tensor_shard(weight, index), weight)
        ```
    """
    for piece in pieces_of(index.fqn, tensor):
        if index.offset is None or piece.box.offsets == tuple(index.offset):
            return piece.memory
    raise UsageError("this rank has no such slice of the tensor", seen=f"{index}")


def find_state_dict_object(state_dict: Mapping[str, Any], index: MetadataIndex) -> Any:
    """Return a value of a flat state, or this rank's memory of a slice of a tensor.

    Args:
        state_dict: A state of one level.
        index: The name and, for a slice of a tensor, its offset.

    Returns:
        The value, or the memory of the slice.

    Raises:
        UsageError: There is no such name, or this rank has no such slice.

    Example:
        ```python
        assert torch.equal(utils.find_state_dict_object({"weight": weight}, index), weight)
        ```
    """
    if index.fqn not in state_dict:
        raise UsageError("the state has no such name", seen=repr(index.fqn))
    value = state_dict[index.fqn]
    return find_tensor_shard(value, index) if isinstance(value, torch.Tensor) else value
