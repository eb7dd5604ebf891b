"""How an object's state is taken, and put back.

The protocol is torch's: `state_dict` and `load_state_dict`. Four kinds need more:

- a module in a wrapper (DistributedDataParallel, a compiled module) is saved as the module within,
  so that the names are the same with and without the wrapper;
- a module is compared with the file before anything is loaded: names, shapes and dtypes;
- an optimizer whose state is sharded has `consolidate_state_dict`, which all ranks call, and
  `local_state_dict`, each rank's part of the whole, which is what a sharded checkpoint takes;
- a dict or a list is its own state, and is filled in place.

What all ranks share is saved once. An object wrapped in `PerRank` is saved by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from dure.checkpoint.names import WRAPPERS
from dure.checkpoint.parts import can_be_named, can_be_stored, dtype_name
from dure.checkpoint.stateful import Stateful
from dure.checkpoint.tree import decode, encode
from dure.errors import CheckpointMismatch, UsageError
from dure.training.pytrees import mapped

__all__ = [
    "PerRank",
    "Reader",
    "Sharded",
    "bare",
    "check_fits",
    "is_sharded",
    "is_stateful",
    "load_into",
    "own_state",
    "state_of",
    "to_tree",
    "whole_tree",
]

_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks an object whose state differs from rank to rank: each rank saves and loads its own.

    Such a checkpoint is loaded by as many ranks as saved it.
    """

    value: Any


@runtime_checkable
class Sharded(Protocol):
    """An optimizer of which each rank holds a part, as `dure.ZeroRedundancyOptimizer`."""

    state: Any

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to rank `to`. Collective."""
        ...

    def local_state_dict(self) -> Any:
        """Return this rank's part, in the form of the whole."""
        ...


class Reader(Protocol):
    """Where the tensors of a checkpoint are read."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, mapped from its file."""
        ...


def bare(value: Any) -> Any:
    """Return what is inside wrappers: the module itself, the value of a `PerRank`."""
    if isinstance(value, PerRank):
        return bare(value.value)
    if isinstance(value, WRAPPERS):
        return bare(value.module)
    inner = getattr(value, "_orig_mod", None) if isinstance(value, nn.Module) else None
    return value if inner is None else bare(inner)


def is_sharded(value: Any) -> bool:
    """Tell whether each rank holds a part of the object's state."""
    return isinstance(bare(value), Sharded)


def state_of(name: str, value: Any, local: bool = False) -> Any:
    """Return an object's state; with `local`, the part of a sharded one that is this rank's.

    Raises:
        UsageError: It has none.
    """
    inner = bare(value)
    if local and isinstance(inner, Sharded):
        return inner.local_state_dict()
    if isinstance(inner, type):
        raise _stateless(name, f"{inner.__qualname__} is a class")
    if isinstance(inner, dict | list):
        return cast(Any, inner)
    if isinstance(inner, Stateful):
        return inner.state_dict()
    raise _stateless(name, f"a {type(inner).__qualname__} has no state_dict and load_state_dict")


def is_stateful(value: Any) -> bool:
    """Tell whether an object has both `state_dict` and `load_state_dict`; tensors have neither."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def own_state(value: Any) -> Any:
    """Return the state of what is stateful, of a wrapper that of its module; else `value`."""
    return bare(value).state_dict() if is_stateful(value) else value


def _stateless(name: str, seen: str) -> UsageError:
    fix = "Pass objects that have both, or a dict or list."
    return UsageError(f"{name!r} cannot be saved", seen=seen, fix=fix)


def whole_tree(parts: list[Any]) -> Any:
    """Put the trees of a sharded optimizer's parts together.

    Parameters' entries are those of all parts; all else is of the first.
    """
    entries: dict[int, Any] = {}
    others: list[Any] = []
    for part in parts:
        state = part["state"]
        pairs = state["v"] if "$" in state else [list(pair) for pair in state.items()]
        entries |= {key: entry for key, entry in pairs if isinstance(key, int)}
        if part is parts[0]:
            others = [pair for pair in pairs if not isinstance(pair[0], int)]
    numbered = [[key, entries[key]] for key in sorted(entries)]
    return {**parts[0], "state": {"$": "map", "v": numbered + others}}


def to_tree(name: str, state: Any, tensors: dict[str, torch.Tensor], prefix: str = "") -> Any:
    """Turn a state into a tree, its tensors into `tensors`; refuse what the file cannot hold."""
    tree = encode(state, prefix + name, tensors)
    for path, tensor in tensors.items():
        if not can_be_stored(tensor.dtype):
            raise UsageError(
                "a tensor cannot be saved in a checkpoint", seen=f"{path} is {tensor.dtype}"
            )
        if not can_be_named(path):
            raise UsageError(
                "a tensor cannot be saved under this name", seen=f"it is called {path!a}"
            )
    return tree


def check_fits(name: str, value: Any, tree: Any, entries: dict[str, Any]) -> None:
    """Compare a module, or an optimizer's groups, with what was saved under `name`.

    Raises:
        CheckpointMismatch: They differ; the first differences are named.
    """
    inner = bare(value)
    if isinstance(inner, nn.Module):
        wanted, found = _shapes_of(inner.state_dict()), _shapes_in(tree, entries)
        _refuse(name, _differences(wanted, found))
    elif isinstance(inner, torch.optim.Optimizer) and isinstance(tree, dict):
        saved = cast(dict[str, Any], tree).get("param_groups", [])
        sizes = [len(group.get("params", ())) for group in saved]
        own = [len(group["params"]) for group in inner.param_groups]
        if sizes != own:
            _refuse(name, [f"parameters in each group: {sizes} in the file, {own} here"])


def _shapes_of(state: dict[str, Any]) -> dict[str, str]:
    return {
        k: f"{list(v.shape)} {dtype_name(v.dtype) if can_be_stored(v.dtype) else v.dtype}"
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and not v.is_complex()
    }


def _shapes_in(tree: Any, entries: dict[str, Any]) -> dict[str, str]:
    fields = cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
    if "$" in fields:  # an OrderedDict, or keys that are no plain names
        fields = {pair[0]: pair[1] for pair in fields["v"] if isinstance(pair[0], str)}
    return {
        k: f"{list(entries[node['v']].shape)} {entries[node['v']].dtype}"
        for k, node in fields.items()
        if isinstance(node, dict) and cast(dict[str, Any], node).get("$") == "tensor"
    }


def _differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    lines = [
        f"{k} is {found[k]} in the file, {v} here"
        for k, v in wanted.items()
        if k in found and found[k] != v
    ]
    lines += [f"{k} is not in the file" for k in wanted if k not in found]
    return lines + [f"{k} is in the file only" for k in found if k not in wanted]


def _refuse(name: str, differences: list[str]) -> None:
    if not differences:
        return
    more = len(differences) - _NUM_SHOWN
    raise CheckpointMismatch(
        f"{name!r} in the checkpoint is of another object",
        seen="; ".join(differences[:_NUM_SHOWN]) + (f"; and {more} more" if more > 0 else ""),
        fix="Load it into the model that was saved, or save in another folder.",
    )


def load_into(name: str, value: Any, tree: Any, reader: Reader) -> None:
    """Put a saved state back.

    A module copies it into the memory that it has, straight from the mapped file. Others may keep
    what they are given, and get tensors of their own.

    Raises:
        CheckpointMismatch: The object refuses the state.
    """
    inner = bare(value)
    if isinstance(inner, nn.Module | Sharded):
        state = decode(tree, reader.tensor)
    else:  # what was one tensor in two places is so again
        state = decode(tree, cache(lambda n: reader.tensor(n).clone()))
    try:
        if isinstance(inner, dict):
            inner.clear()
            inner.update(state)
        elif isinstance(inner, list):
            inner[:] = state
        else:
            cast(Stateful, inner).load_state_dict(state)
        if isinstance(inner, Sharded):  # it has kept its part of what is mapped
            inner.state.update({k: mapped(v, torch.clone) for k, v in inner.state.items()})
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise CheckpointMismatch(
            f"{name!r} does not take the saved state", seen=f"{type(e).__name__}: {e}"
        ) from e
