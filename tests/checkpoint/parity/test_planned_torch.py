"""Planners and storages of one's own: torch and Dure call them in the same order, with equal plans.

The same classes over torch's and over Dure's, whose every call is written down with what it was
given and what it returned.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as theirs
import torch.distributed.checkpoint.planner as their_planner
import torch.distributed.checkpoint.storage as their_storage

import dure.checkpoint as ours
import dure.checkpoint.planner as our_planner
import dure.checkpoint.storage as our_storage
from dure.device_mesh import init_device_mesh
from dure.tensor import Shard, distribute_tensor
from dure.testing import run_ranks

BASES = (
    theirs.SavePlanner,
    theirs.LoadPlanner,
    theirs.StorageWriter,
    theirs.StorageReader,
)
HOOKS = sorted({name for base in BASES for name in vars(base) if not name.startswith("_")})
HOOKS.remove("validate_checkpoint_id")  # of the class; torch calls it where it likes


def plain(value: Any) -> Any:
    """Return what is in a plan, or in metadata, without its classes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Size | list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "requires_grad"):  # torch calls its other properties deprecated
        return {"dtype": str(value.dtype)}
    if hasattr(value, "__dataclass_fields__"):
        names = [name for name in value.__dataclass_fields__ if name != "version"]
        return {name: plain(getattr(value, name)) for name in names}
    return str(value) if value is None or isinstance(value, str | int | torch.dtype) else "object"


def noted(subject: Any, calls: list[Any]) -> Any:
    """Write down every call of an object's hooks."""
    for name in HOOKS:
        hook = getattr(subject, name, None)
        if hook is not None:

            @functools.wraps(hook)  # torch looks at signatures
            def call(*args: Any, _hook: Any = hook, _name: str = name, **options: Any) -> Any:
                place = len(calls)
                calls.append([_name, plain(args), plain(options)])
                result = _hook(*args, **options)
                calls[place].append(plain(result))
                return result

            setattr(subject, name, call)
    return subject


def finished(result: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


def kept_in(storage: Any, memory: dict[Any, Any]) -> tuple[Any, Any]:
    """Return a writer and a reader, over a library's classes, of items in a dict."""

    def ignore(self: Any, *args: Any) -> None:
        pass

    def same(self: Any, plan: Any) -> Any:
        return plan

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            data = planner.resolve_data(item)
            memory[item.index] = data if isinstance(data, io.BytesIO) else data.clone()
        return finished([storage.WriteResult(item.index, 1, "here") for item in plan.items])

    def finish(self: Any, metadata: Any, results: Any) -> None:
        memory["metadata"] = metadata

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            data = memory[item.storage_index]
            if isinstance(data, io.BytesIO):
                data.seek(0)
                planner.load_bytes(item, data)
            else:
                to = planner.resolve_tensor(item)
                to.copy_(data)
                planner.commit_tensor(item, to)
        return finished(None)

    both = {"reset": ignore, "prepare_local_plan": same, "prepare_global_plan": same}
    both["validate_checkpoint_id"] = classmethod(lambda cls, where: True)  # pyright: ignore
    writing = {"set_up_storage_writer": ignore, "write_data": write_data, "finish": finish}
    reading = {"set_up_storage_reader": ignore, "read_data": read_data}
    reading["read_metadata"] = lambda self: memory["metadata"]  # pyright: ignore
    return (
        type("Writer", (storage.StorageWriter,), both | writing)(),
        type("Reader", (storage.StorageReader,), both | reading)(),
    )


def calls_of(library: Any, planner: Any, storage: Any) -> tuple[list[Any], dict[str, Any]]:
    """Save a state and load it into another under a planner of one's own; return the calls."""

    class Saver(library.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta=None, is_coordinator=False):
            renamed = {f"my.{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, storage_meta, is_coordinator)

        def transform_object(self, write_item: Any, object: Any):
            made = super().transform_object(write_item, object)
            return made if write_item.type == planner.WriteItemType.BYTE_IO else made.double() + 0.5

    class Loader(library.DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata=None, is_coordinator=False):
            renamed = {f"my.{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, metadata, is_coordinator)
            self.given = state_dict

        def load_bytes(self, read_item: Any, value: Any):
            assert read_item.type == planner.LoadItemType.BYTE_IO
            self.given[read_item.dest_index.fqn[3:]] = torch.load(value, weights_only=True)

    calls: list[Any] = []
    writer, reader = (noted(one, calls) for one in kept_in(storage, {}))
    state = {"a": torch.arange(6.0).view(2, 3), "in": {"b": torch.ones(2)}, "step": 7}
    noted_saver = noted(Saver(), calls)
    library.save(state, checkpoint_id="x", storage_writer=writer, planner=noted_saver, no_dist=True)
    calls.append("then")
    into = {"a": torch.zeros(2, 3), "in": {"b": torch.zeros(2)}, "step": 0}
    noted_loader = noted(Loader(), calls)
    library.load(into, checkpoint_id="x", storage_reader=reader, planner=noted_loader, no_dist=True)
    return calls, into


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_hooks_are_called_in_torchs_order_with_equal_plans():
    wanted, their_state = calls_of(theirs, their_planner, their_storage)
    found, our_state = calls_of(ours, our_planner, our_storage)
    assert [one[0] for one in found] == [one[0] for one in wanted]
    for mine, other in zip(found, wanted, strict=True):
        assert mine == other
    assert our_state["a"].tolist() == [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]] and our_state["step"] == 7
    assert plain(our_state) == plain(their_state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_refuse_dtensors_and_say_where_to_import_from(tmp_path: Path) -> None:
    """Each rank would save its part as if it were alone, and one would replace the others."""

    def body(rank: int) -> None:
        mesh, folder = init_device_mesh("cpu", (2,)), tmp_path / f"{rank}"
        state: dict[str, Any] = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
        for function in (theirs.save, theirs.load):
            with pytest.raises(theirs.api.CheckpointException) as caught:
                function(state, checkpoint_id=folder, no_dist=True)
            error = caught.value.failures[0][0]  # what loading raised is the cause of torch's own
            assert "import dure.checkpoint as dcp" in f"{error} {error.__cause__}"
            if function is theirs.save:
                theirs.save({"w": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)

    run_ranks(2, body)
