"""Forms of the states that `state_dict` gives and takes: changed leaf by leaf, flattened, received.

A state is nested dicts and lists. An optimizer's may have one level of names instead
(`flattened`), and rank 0 may send one to all ranks, each of which keeps its part (`from_rank_0`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.comm.collectives import broadcast
from dure.comm.group import ProcessGroup
from dure.errors import CheckpointMismatch, UsageError
from dure.tensor import DTensor, distribute_tensor
from dure.tensor.wrapping import wrap

__all__ = [
    "Path",
    "State",
    "cut_like",
    "each_leaf",
    "flattened",
    "from_rank_0",
    "nested_state",
    "on_host",
    "options_of",
]

State = dict[str, Any]
Path = tuple[Any, ...]

_NUM_SENT_AS_VALUE = 16
"""Elements up to which a tensor is sent along with the values."""


class _TensorStandIn(NamedTuple):
    """Stands for a tensor that rank 0 sends after."""

    shape: torch.Size
    dtype: torch.dtype


def from_rank_0(
    ranks: Ranks,
    group: ProcessGroup,
    given: State,
    like: Callable[[Path], Any],
    device_of: Callable[[Any], torch.device],
) -> State:
    """Return rank 0's state on all ranks, without entries for which `like` returns None.

    Args:
        ranks: The ranks of the group.
        group: The same.
        given: The state, on rank 0.
        like: Returns for each entry the tensor as which it is cut.
        device_of: Returns for that tensor, or None, where the full one is received.

    Raises:
        UsageError: Rank 0 has a DTensor.

    Collective:
        All ranks of the group. Each tensor is one broadcast.
    """
    full: dict[Path, torch.Tensor] = {}

    def stand_in(path: Path, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, DTensor):
            raise UsageError("rank 0 must have full tensors", seen=f"{path} is a DTensor")
        if value.numel() <= _NUM_SENT_AS_VALUE:
            return value.detach().cpu()
        full[path] = value.detach()
        return _TensorStandIn(value.shape, value.dtype)

    def receive(path: Path, value: Any) -> Any:
        if not isinstance(value, _TensorStandIn):
            return value
        target = like(path)
        tensor = full.get(path)
        if tensor is None:
            tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        tensor = tensor.to(device_of(target)).contiguous()
        broadcast(tensor, src=0, group=group)
        return None if target is None else cut_like(tensor, target)

    return each_leaf(ranks.first(lambda: each_leaf(given, stand_in)), receive)


def options_of(group: Mapping[str, Any]) -> State:
    """Return what a group says beside its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def each_leaf(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a state with each leaf changed; dicts and lists are entered."""
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {key: each_leaf(inner, change, (*path, key)) for key, inner in items}
    if isinstance(value, list):
        inners = enumerate(cast(list[Any], value))
        return [each_leaf(inner, change, (*path, i)) for i, inner in inners]
    return change(path, value)


def cut_like(value: Any, like: Any) -> Any:
    """Cut a full tensor as the DTensor `like`; return other values as they are."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not plain or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    full = value.detach().to(like.device_mesh.device_type)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def on_host(value: Any) -> Any:
    """Return a tensor that is in the host's memory, with the same placements."""
    if isinstance(value, DTensor):
        return wrap(value.to_local().detach().cpu(), value.spec)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def flattened(state: State) -> State:
    """Return an optimizer's state as one level of names."""
    flat: State = {}

    def enter(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in cast(Mapping[str, Any], value).items():
                enter(f"{name}.{key}", inner)
        else:
            flat[name] = value

    enter("state", state["state"])
    for group in state["param_groups"]:
        for name in group["params"]:
            enter(f"param_groups.{name}", options_of(group))
    return flat


def nested_state(flat: Mapping[str, Any], names: Iterable[str]) -> State:
    """Return what `flattened` was given, with one group for each parameter.

    Args:
        flat: One level of names.
        names: Of parameters. Of others, the part after the last dot is taken as the key.
    """
    known = set(names)
    made: dict[str, dict[str, State]] = {"state": {}, "param_groups": {}}
    for name, value in flat.items():
        kind, *keys = name.split(".")
        ends = [end for end in range(1, len(keys)) if ".".join(keys[:end]) in known]
        end = ends[-1] if ends else len(keys) - 1
        if kind not in made or end < 1:
            raise CheckpointMismatch("a name is not of an optimizer's state", seen=f"{name!r}")
        place = made[kind].setdefault(".".join(keys[:end]), {})
        for key in keys[end:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
    groups = [options | {"params": [name]} for name, options in made["param_groups"].items()]
    return {"state": made["state"], "param_groups": groups}
