"""Planners, under torch's names: which items of a state are written, and where read ones go.

`planned` runs them. A custom planner is best a subclass of a default one: `set_up_planner`
may rename or leave out, `lookup_object` and `transform_object`, or `transform_tensor`, convert.
Items and plans are in `plan_items`.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from dure.checkpoint.fresh_state import with_memory
from dure.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from dure.checkpoint.plan_items import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    box_of,
    bytes_of_value,
    read_items,
    value_of_bytes,
    write_items,
)
from dure.checkpoint.slices import Piece, fault_of_cover, full_box, pieces_of
from dure.checkpoint.tree import Path, flatten, put
from dure.errors import CheckpointMismatch, UsageError

__all__ = [
    "BytesIOWriteData",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class SavePlanner(ABC):
    """What is saved, and as what: `save` calls these methods in this order.

    A custom planner is best a subclass of `DefaultSavePlanner`.

    Example:
        ```python
        from dure.checkpoint import DefaultSavePlanner, load, save

        class HalfPrecision(DefaultSavePlanner):
            def set_up_planner(self, state_dict, *args, **kwargs):
                halved = {name: tensor.half() for name, tensor in state_dict.items()}
                super().set_up_planner(halved, *args, **kwargs)

        save({"weight": torch.ones(4)}, checkpoint_id="run/half", planner=HalfPrecision())
        ```
    """

    @abstractmethod
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin a save.

        Args:
            state_dict: The state; objects in it are replaced by what their `state_dict` returned.
            storage_meta: Data about the storage.
            is_coordinator: Whether this rank divides the plans.
        """

    @abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return what this rank has."""

    @abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes, and what the checkpoint holds; called on the coordinator.

        Args:
            all_plans: What `create_local_plan` returned, by rank.
        """

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan as it is carried out.

        Args:
            new_plan: The plan as the coordinator returned it.
        """
        return new_plan

    @abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's data.

        Args:
            write_item: An item of the finished plan.

        Returns:
            The slice, of the dtype and sizes that were planned; or the bytes of a value.
        """


class LoadPlanner(ABC):
    """What is loaded to where: `load` calls these methods in this order.

    A custom planner is best a subclass of `DefaultLoadPlanner`.

    Example:
        ```python
        from dure import checkpoint

        class Doubling(checkpoint.DefaultLoadPlanner):
            def commit_tensor(self, read_item, tensor):
                tensor.mul_(2)  # after the values were read into it
                super().commit_tensor(read_item, tensor)

        checkpoint.save({"weight": torch.ones(2)}, checkpoint_id="run/step1")
        state = {"weight": torch.zeros(2)}
        checkpoint.load(state, checkpoint_id="run/step1", planner=Doubling())
        assert state["weight"].tolist() == [2.0, 2.0]
        ```
    """

    @abstractmethod
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin a load.

        Args:
            state_dict: The state that is filled; objects in it are replaced by their own states.
            metadata: The contents of the checkpoint.
            is_coordinator: Whether this rank passes on the plans.
        """

    @abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank needs."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return what each rank reads; called on the coordinator.

        Args:
            global_plan: What `create_local_plan` returned, by rank.
        """
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan as it is carried out.

        Args:
            new_plan: The plan as the coordinator returned it.
        """
        return new_plan

    @abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state.

        Args:
            read_item: Its item.
            value: The bytes that `torch.save` made.
        """

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return where bytes are read to, for storages that ask; Dure's call `load_bytes`.

        Args:
            read_item: An item of a value.

        Raises:
            NotImplementedError: As in torch, unless a subclass has it.
        """
        raise NotImplementedError("LoadPlanner.resolve_bytes is not implemented")

    @abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where elements are read to.

        Args:
            read_item: An item of a tensor.

        Shapes:
            The result: [*read_item.lengths]; any dtype and strides.
        """

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Finish an item whose elements were read.

        Args:
            read_item: The item.
            tensor: What `resolve_tensor` returned, filled.
        """
        return


class _FlatPlanner:
    """What both default planners know of a state."""

    state_dict: dict[str, Any]
    """By flat name; `set_up_planner` makes it."""
    mappings: dict[str, Path]
    """The keys that lead to each."""

    def __init__(self, flatten_state_dict: bool) -> None:
        if not flatten_state_dict:
            raise UsageError("a checkpoint has flat names", seen="flatten_state_dict is False")
        self.flatten_state_dict = True

    def _take(self, state_dict: dict[str, Any], is_coordinator: bool) -> None:
        leaves = flatten(state_dict)
        self.state_dict = {name: leaf.value for name, leaf in leaves.items()}
        self.mappings = {name: leaf.path for name, leaf in leaves.items()}
        self.is_coordinator = is_coordinator

    def _piece(self, index: MetadataIndex) -> Piece:
        """Return the piece of this rank's tensor that begins where an index says."""
        value = self.state_dict[index.fqn]
        for piece in pieces_of(index.fqn, value):
            if index.offset is None or piece.box.offsets == tuple(index.offset):
                return piece
        return Piece(full_box(value.shape), value)  # without elements


class DefaultSavePlanner(_FlatPlanner, SavePlanner):
    """Plans all of the state; items of several ranks are written by the least loaded.

    `save` plans in its own, quicker way where it is given this class itself.

    Args:
        flatten_state_dict: Only True.
        flatten_sharded_tensors: No effect.
        dedup_replicated_tensors: No effect.
        dedup_save_to_lowest_rank: The lowest rank that has an item writes it.
        enable_plan_caching: No effect.

    Raises:
        UsageError: `flatten_state_dict` is False.

    Example:
        ```python
        class OnlyFloats(checkpoint.DefaultSavePlanner):
            def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
                floats = {k: v for k, v in state_dict.items() if v.is_floating_point()}
                super().set_up_planner(floats, storage_meta, is_coordinator)

        state = {"weight": torch.ones(2), "count": torch.tensor(3)}
        checkpoint.save(state, checkpoint_id="run/floats", planner=OnlyFloats())
        saved = checkpoint.FileSystemReader("run/floats").read_metadata()
        assert set(saved.state_dict_metadata) == {"weight"}
        ```
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict)
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state.

        Args:
            state_dict: The state.
            storage_meta: No effect.
            is_coordinator: Kept as an attribute.
        """
        self._take(state_dict, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return an item for each slice and value that this rank has."""
        items = [item for n, v in self.state_dict.items() for item in write_items(n, v)]
        return SavePlan(items, planner_data=self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave each item to one rank.

        Args:
            all_plans: By rank.

        Returns:
            The plans with the items that each rank writes, and what the checkpoint holds.

        Raises:
            CheckpointMismatch: Slices overlap, or do not cover a tensor. Or ranks have different
                shapes or dtypes under one name, or a tensor and a value.
        """
        _require_one_kind(all_plans)
        holders: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append(rank)
        loads, found = [0] * len(all_plans), dict[str, Any]()
        writer: dict[MetadataIndex, int] = {}
        sizes = {i.index: i.tensor_storage_size() or 1 for p in all_plans for i in p.items}
        for index, ranks in holders.items():
            lowest = self.dedup_save_to_lowest_rank
            rank = min(ranks) if lowest else min(ranks, key=lambda r: loads[r])
            loads[rank] += sizes[index]
            writer[index] = rank
        plans: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            items = [_noted(i, found) for i in plan.items if writer.get(i.index) == rank]
            plans.append(replace(plan, items=items))
        for name, saved in found.items():
            if isinstance(saved, TensorStorageMetadata):
                boxes = [box for box in map(box_of, saved.chunks) if box.num_elements]
                fault = fault_of_cover(saved.size, boxes)
                if fault:
                    raise CheckpointMismatch("plans do not fit together", seen=f"{name}: {fault}")
        paths = {n: p for plan in reversed(plans) for n, p in (plan.planner_data or {}).items()}
        self.metadata = Metadata(found, paths)
        return plans, self.metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what `transform_object` makes of what `lookup_object` finds.

        Args:
            write_item: An item of the finished plan.
        """
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value, or this rank's memory of a slice.

        Args:
            index: The name and, of a tensor, where the slice begins.
        """
        value = self.state_dict[index.fqn]
        return self._piece(index).memory if isinstance(value, torch.Tensor) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor as it is, and the bytes of a value.

        Args:
            write_item: The item.
            object: What `lookup_object` found.
        """
        return bytes_of_value(object) if write_item.type == WriteItemType.BYTE_IO else object


def _require_one_kind(plans: list[SavePlan]) -> None:
    kinds: dict[str, tuple[int, object]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            kind = "a value" if data is None else (data.properties.dtype, tuple(data.size))
            lowest, its = kinds.setdefault(name, (rank, kind))
            if kind != its:
                raise CheckpointMismatch(
                    "ranks plan different objects under one name, and one would be lost",
                    seen=f"{name} is {kind} on rank {rank}, {its} on rank {lowest}",
                    fix="Use a separate name for what differs between ranks.",
                )


def _noted(item: WriteItem, found: dict[str, Any]) -> WriteItem:
    """Add an item to what the checkpoint holds; return it with its number among the slices."""
    data, name = item.tensor_data, item.index.fqn
    if data is None:
        found[name] = BytesStorageMetadata()
        return item
    saved = found.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
    saved.chunks.append(data.chunk)
    number = len(saved.chunks) - 1
    return replace(item, index=MetadataIndex(name, item.index.offset, number))


class DefaultLoadPlanner(_FlatPlanner, LoadPlanner):
    """Plans for each name of the state what there is under it.

    `load` plans in its own, quicker way where it is given this class itself.

    Args:
        flatten_state_dict: Only True.
        flatten_sharded_tensors: No effect.
        allow_partial_load: Leave what is not in the checkpoint as it is, instead of raising.

    Raises:
        UsageError: `flatten_state_dict` is False.

    Example:
        ```python
        state = {"weight": torch.zeros(2), "new": torch.zeros(1)}
        planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
        checkpoint.load(state, checkpoint_id="run/floats", planner=planner)
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """

    original_state_dict: dict[str, Any]
    """What `load_bytes` puts values into."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict)
        self.allow_partial_load = allow_partial_load

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state; tensors on the meta device are replaced by empty ones in it.

        Args:
            state_dict: The state that is filled.
            metadata: The contents of the checkpoint.
            is_coordinator: Kept as an attribute.
        """
        for leaf in with_memory(flatten(state_dict)).values():
            put(state_dict, leaf.path, leaf.value)
        self._take(state_dict, is_coordinator)
        self.original_state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """Return what is read for each name.

        Raises:
            CheckpointMismatch: A name is missing, or another tensor, in the checkpoint.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is None and not self.allow_partial_load:
                raise CheckpointMismatch(f"Missing key in checkpoint state_dict: {name}.")
            if isinstance(saved, BytesStorageMetadata):
                index, none = MetadataIndex(name), torch.Size([0])
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
            elif saved is not None:
                size = tuple(value.shape) if isinstance(value, torch.Tensor) else None
                if size != tuple(saved.size):
                    raise CheckpointMismatch(
                        f"Size mismatch between saved {saved.size} and current: {size} for {name}"
                    )
                boxes = [piece.box for piece in pieces_of(name, value)]
                items += read_items(name, saved, boxes)
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place.

        Args:
            read_item: Its item.
            value: The bytes that `torch.save` made of it.

        Raises:
            CheckpointError: The bytes would run code, or were not made by `torch.save`.
        """
        path = self.mappings[read_item.dest_index.fqn]
        put(self.original_state_dict, path, value_of_bytes(value, read_item.dest_index.fqn))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return what `transform_tensor` makes of what `lookup_tensor` finds.

        Args:
            read_item: An item of a tensor.
        """
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return this rank's memory of a slice.

        Args:
            index: The name, and where the slice begins.
        """
        return self._piece(index).memory

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a slice that are read.

        Args:
            read_item: The item.
            tensor: What `lookup_tensor` found.
        """
        for dim, (at, n) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, at, n)
        return tensor
