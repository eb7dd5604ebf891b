"""Storages, under torch's names: what `planned` writes a plan's items with, and reads them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from dure.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from dure.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

__all__ = ["StorageReader", "StorageWriter", "WriteResult", "done"]

T = TypeVar("T")
CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True)
class WriteResult:
    """What became of one item."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


def done(result: T) -> Future[T]:
    """Return a future that is done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class StorageWriter(ABC):
    """What `save` calls, in this order; futures are torch's or Python's."""

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Learn that another checkpoint will be written, and where."""
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the storage can have a checkpoint there."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin."""
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan, with what the storage adds."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The same for all ranks' plans; on the coordinator."""
        return plans

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write what `planner.resolve_data` returns for each item; a future of `WriteResult`s."""

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint one; on the coordinator, with what all ranks wrote."""

    def storage_meta(self) -> StorageMeta | None:
        """Return metadata for the planner."""
        return None


class StorageReader(ABC):
    """What `load` calls, in this order."""

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Learn that another checkpoint will be read, and which."""
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the storage can have a checkpoint there."""
        return True

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin."""
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan, with what the storage adds."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same for all ranks' plans; on the coordinator."""
        return plans

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read each item to where `planner.resolve_tensor` says, or to its `load_bytes`; a future.

        `planner.commit_tensor` is called after each tensor.
        """
