"""Storages, under torch's names: what `planned` writes a plan's items with, and reads them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from dure.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from dure.checkpoint.plan_items import LoadPlan, SavePlan
from dure.checkpoint.planner import LoadPlanner, SavePlanner

__all__ = ["StorageReader", "StorageWriter", "WriteResult", "done"]

T = TypeVar("T")
CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True)
class WriteResult:
    """What became of one item.

    Attributes:
        index: The item's.
        size_in_bytes: How many bytes were written.
        storage_data: Data of the storage.

    Obtained from:
        A `StorageWriter` makes them; `StorageWriter.finish` receives those of all ranks.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


def done(result: T) -> Future[T]:
    """Return a future that is done.

    Args:
        result: The future's value.

    Returns:
        A future that does not wait.

    Example:
        ```python
        from dure.checkpoint.storage import done

        assert done(3).result() == 3
        ```
    """
    future: Future[T] = Future()
    future.set_result(result)
    return future


class StorageWriter(ABC):
    """A custom storage for `save`, which calls these methods in this order.

    Futures are torch's or Python's. An error on any rank is raised on all.

    Example:
        ```python
        import pickle
        from dure import checkpoint
        from dure.checkpoint.storage import WriteResult, done

        class OneFilePerTensor(checkpoint.StorageWriter):
            def write_data(self, plan, planner):
                results = []
                for item in plan.items:  # those that this rank writes
                    file = Path(f"{item.index.fqn}.pt")
                    torch.save(planner.resolve_data(item), file)
                    results.append(WriteResult(item.index, file.stat().st_size, None))
                return done(results)

            def finish(self, metadata, results):
                Path("metadata").write_bytes(pickle.dumps(metadata))

        checkpoint.save({"weight": torch.ones(2)}, storage_writer=OneFilePerTensor())
        ```
    """

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Prepare for another checkpoint.

        Args:
            checkpoint_id: Where it will be written.
        """
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the storage can have a checkpoint there.

        Args:
            checkpoint_id: As given to `save` or `load`.
        """
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin.

        Args:
            is_coordinator: Whether this rank divides the plans.
            *args: None; torch's signature.
            **kwargs: None; torch's signature.
        """
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan, with what the storage adds.

        Args:
            plan: The plan of the planner.
        """
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return all ranks' plans, with what the storage adds; called on the coordinator.

        Args:
            plans: By rank.
        """
        return plans

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's items.

        Args:
            plan: The items.
            planner: Its `resolve_data` returns each item's data.

        Returns:
            A future of a list of `WriteResult`.
        """

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; called on the coordinator when all ranks have written.

        Args:
            metadata: The contents of the checkpoint.
            results: What `write_data` returned, by rank.
        """

    def storage_meta(self) -> StorageMeta | None:
        """Return metadata for the planner."""
        return None


class StorageReader(ABC):
    """A custom storage for `load`, which calls these methods in this order.

    Example:
        ```python
        class FromOneFilePerTensor(checkpoint.StorageReader):  # reads what the writer above wrote
            def read_metadata(self, *args, **kwargs):
                return pickle.loads(Path("metadata").read_bytes())

            def read_data(self, plan, planner):
                for item in plan.items:
                    target = planner.resolve_tensor(item)
                    target.copy_(torch.load(f"{item.storage_index.fqn}.pt"))
                    planner.commit_tensor(item, target)
                return done(None)

        state = {"weight": torch.zeros(2)}
        checkpoint.load(state, storage_reader=FromOneFilePerTensor())
        assert state["weight"].tolist() == [1.0, 1.0]
        ```
    """

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Prepare for another checkpoint.

        Args:
            checkpoint_id: Which will be read.
        """
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the storage can have a checkpoint there.

        Args:
            checkpoint_id: As given to `save` or `load`.
        """
        return True

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds.

        Args:
            *args: None; torch's signature.
            **kwargs: None; torch's signature.
        """

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin.

        Args:
            metadata: What `read_metadata` returned.
            is_coordinator: Whether this rank passes on the plans.
            *args: None; torch's signature.
            **kwargs: None; torch's signature.
        """
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan, with what the storage adds.

        Args:
            plan: The plan of the planner.
        """
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return all ranks' plans, with what the storage adds; called on the coordinator.

        Args:
            plans: By rank.
        """
        return plans

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read this rank's items.

        Args:
            plan: The items.
            planner: A tensor is read into what its `resolve_tensor` returns, and then passed to its
                `commit_tensor`; bytes are passed to its `load_bytes`.

        Returns:
            A future that is done when all is read.
        """
