"""Saves and loads that custom planners and storages carry out, in torch's order of calls.

Plans go through the coordinator; a failure on any rank fails on all, after each step. With a
custom planner, and no such storage, its resolved values are saved into a folder as any state is.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.metadata import Metadata
from dure.checkpoint.objects import own_state
from dure.checkpoint.plan_items import SavePlan, WriteItem, box_of, value_of_bytes
from dure.checkpoint.planner import LoadPlanner, SavePlanner
from dure.checkpoint.replicas import marks_by_name, require_alike
from dure.checkpoint.restoring import give_back, in_order, modules_in
from dure.checkpoint.saving import OnDemand, Taken
from dure.checkpoint.slice_files import Slice, kind_of
from dure.checkpoint.storage import StorageReader, StorageWriter
from dure.checkpoint.tree import Index, encode, flatten, require_dense
from dure.errors import CheckpointMismatch, UsageError

__all__ = ["load_planned", "nested", "save_planned", "taken_of"]

_NOT_SAVED, _NOT_LOADED = "the checkpoint was not saved", "the checkpoint was not loaded"


def _outcome(future: Any) -> Any:
    """Wait for a future of Python's, or of torch's."""
    return future.wait() if isinstance(future, torch.futures.Future) else future.result()


def _planned(
    state_dict: Mapping[str, Any],
    writer: StorageWriter | None,
    planner: SavePlanner,
    ranks: Ranks,
    coordinator: int,
) -> tuple[list[SavePlan], Metadata]:
    """Return what each rank writes, before it is finished; and what the checkpoint holds."""
    ranks.require_others()
    leads = ranks.rank == coordinator

    def local() -> tuple[SavePlan, dict[str, int]]:
        state = {key: own_state(value) for key, value in state_dict.items()}
        marks = marks_by_name(state_dict, state, ranks.global_ranks)
        about = None if writer is None else writer.storage_meta()
        planner.set_up_planner(state_dict=state, storage_meta=about, is_coordinator=leads)
        if writer is None:
            return planner.create_local_plan(), marks
        writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(planner.create_local_plan()), marks

    def divide() -> tuple[list[SavePlan], Metadata] | None:
        require_alike([marks for _, marks in sent])
        if not leads:
            return None
        divided, metadata = planner.create_global_plan([plan for plan, _ in sent])
        return (divided if writer is None else writer.prepare_global_plan(divided)), metadata

    sent = ranks.all_or_none(_NOT_SAVED, local)
    divided = ranks.all_or_none(_NOT_SAVED, divide)[coordinator]
    assert divided is not None
    return divided


def save_planned(
    state_dict: Mapping[str, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    ranks: Ranks,
    coordinator: int = 0,
) -> Metadata:
    """Save a state; return what the coordinator's planner says of it.

    Raises:
        CheckpointException: It failed on some ranks.

    Collective:
        All of `ranks`. Four exchanges.
    """
    plans, metadata = _planned(state_dict, writer, planner, ranks, coordinator)

    def write() -> Any:
        return _outcome(writer.write_data(planner.finish_plan(plans[ranks.rank]), planner))

    results = ranks.all_or_none(_NOT_SAVED, write)

    def finish() -> None:
        if ranks.rank == coordinator:
            writer.finish(metadata=metadata, results=results)

    ranks.all_or_none(_NOT_SAVED, finish)
    return metadata


def taken_of(
    state_dict: Mapping[str, Any], planner: SavePlanner, ranks: Ranks, coordinator: int = 0
) -> Taken:
    """Return what a planner makes of a state, to be saved into a folder.

    A tensor gets the dtype of its plan.

    Raises:
        CheckpointException: It failed on some ranks.

    Collective:
        All of `ranks`. Three exchanges.
    """
    plans, metadata = _planned(state_dict, None, planner, ranks, coordinator)
    taken: list[Taken] = []

    def take() -> None:
        items: dict[Slice, WriteItem] = {}
        leaves: dict[str, Any] = {}
        made = Taken({}, OnDemand(partial(_resolved, planner, items)), None)
        for item in planner.finish_plan(plans[ranks.rank]).items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                leaves[name] = value_of_bytes(cast(Any, planner.resolve_data(item)), name)
                continue
            leaves[name] = torch.empty((), device="cpu")
            dtype, box = data.properties.dtype, box_of(data.chunk)
            kind = kind_of(torch.empty(data.size, dtype=dtype, device="meta"))
            if kind is None:
                raise UsageError("a tensor cannot be in a checkpoint", seen=f"{name} is {dtype}")
            before = made.offer.get(name, (kind, (), 0))[1]
            if box.num_elements and box not in before:  # a planner may have an item twice
                made.offer[name] = kind, (*before, box), 0
            else:
                made.offer[name] = kind, before, 0
            items[Slice(name, box)] = item
        tensors: dict[str, torch.Tensor] = {}
        tree = encode(nested(leaves, metadata.planner_data), "", tensors)
        if tensors.keys() != made.offer.keys():
            seen = str(min(tensors.keys() ^ made.offer.keys()))
            raise UsageError("a planner's names, and the keys that lead there, differ", seen=seen)
        taken.append(Taken(made.offer, made.memory, tree))

    ranks.all_or_none(_NOT_SAVED, take)
    return taken[0]


def _resolved(planner: SavePlanner, items: dict[Slice, WriteItem], part: Slice) -> torch.Tensor:
    found = cast(torch.Tensor, planner.resolve_data(items[part])).detach()
    data = items[part].tensor_data
    if data is None or tuple(found.shape) != part.box.sizes:
        seen = f"{list(found.shape)} for {part.name}{part.box}"
        raise CheckpointMismatch("a planner resolved other data than it planned", seen=seen)
    return found.to(data.properties.dtype).resolve_conj().resolve_neg()


def nested(leaves: dict[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[Any, Any]:
    """Return leaves in dicts, below the keys that lead to them."""
    root: dict[Any, Any] = {}
    for name, value in leaves.items():
        keys = [int(k) if isinstance(k, Index) else k for k in paths.get(name, (name,))]
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
    return root


def load_planned(
    state_dict: MutableMapping[str, Any],
    reader: StorageReader,
    planner: LoadPlanner,
    ranks: Ranks,
    coordinator: int = 0,
) -> None:
    """Load into a state, in place.

    Raises:
        CheckpointException: It failed on some ranks.

    Collective:
        All of `ranks`. Three exchanges.
    """
    leads = ranks.rank == coordinator
    state: dict[str, Any] = {}

    def local() -> Any:
        state.update((key, own_state(state_dict[key])) for key in in_order(state_dict))
        for name, leaf in flatten({k: state[k] for k in modules_in(state_dict)}).items():
            if isinstance(leaf.value, torch.Tensor):
                require_dense(name, leaf.value)  # it would be loaded into parameters without memory
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, leads)
        reader.set_up_storage_reader(metadata, leads)
        return reader.prepare_local_plan(planner.create_local_plan())

    def divide() -> Any:
        return reader.prepare_global_plan(planner.create_global_plan(plans)) if leads else None

    def read() -> None:
        _outcome(reader.read_data(planner.finish_plan(divided[ranks.rank]), planner))
        give_back(state_dict, state)

    plans = ranks.all_or_none(_NOT_LOADED, local)
    divided = ranks.all_or_none(_NOT_LOADED, divide)[coordinator]
    ranks.all_or_none(_NOT_LOADED, read)
