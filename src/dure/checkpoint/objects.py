"""How an object's state is taken, and put back.

The protocol is torch's: `state_dict` and `load_state_dict`. Four kinds need more:

- a module in a wrapper (DistributedDataParallel, a compiled module) is saved as the module within,
  so that the names are the same with and without the wrapper;
- a module is compared with the file before anything is loaded: names, shapes and dtypes;
- an optimizer whose state is sharded has `local_state_dict`, each rank's part of it, and all
  ranks save theirs, as they do of DTensors;
- a dict or a list is its own state, and is filled in place, with the tensors in it (`filling`).

State that all ranks share is saved once. An object wrapped in `PerRank` is saved by every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from dure.checkpoint.dataclass_fields import Fields, with_instances
from dure.checkpoint.filling import fill, unlike
from dure.checkpoint.fresh_state import fresh_state
from dure.checkpoint.names import WRAPPERS
from dure.checkpoint.scalers import set_stages
from dure.checkpoint.slice_files import TensorKind, kind_of
from dure.checkpoint.stateful import Stateful
from dure.checkpoint.tree import decode, entries_of
from dure.errors import CheckpointMismatch, DureError, OptimizerError, UsageError
from dure.tensor import DTensor
from dure.training.pytrees import mapped

__all__ = [
    "PerRank",
    "Positioned",
    "Sharded",
    "bare",
    "check_fits",
    "few",
    "is_divided",
    "is_sharded",
    "is_stateful",
    "load_into",
    "own_state",
    "state_of",
]

_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks an object whose state differs from rank to rank: each rank saves and loads its own.

    Such a checkpoint is loaded by as many ranks as saved it.

    Attributes:
        value: The object.

    Example:
        ```python
        from dure import checkpoint

        seen = [dist.get_rank()]  # other values on each rank
        checkpoints = checkpoint.Checkpointer("runs/mine")
        checkpoints.save(0, seen=checkpoint.PerRank(seen))
        seen.clear()
        checkpoints.load(seen=checkpoint.PerRank(seen))
        assert seen == [dist.get_rank()]
        ```
    """

    value: Any


@runtime_checkable
class Sharded(Protocol):
    """An optimizer of which each rank holds a part, as `dure.ZeroRedundancyOptimizer`."""

    state: Any

    def local_state_dict(self) -> Any:
        """Return this rank's part, in the form of the full state."""
        ...


@runtime_checkable
class Positioned(Protocol):
    """An object that ranks may have at different positions, as `dure.data.DataLoader`."""

    def own_position(self) -> dict[str, Any]:
        """Return where this rank is."""
        ...

    def state_at(
        self, state: Mapping[str, Any], positions: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        """Return the state that this rank has to load, given the positions of those that saved."""
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


def is_divided(value: Any) -> bool:
    """Tell whether the object is a module or an optimizer with DTensors."""
    inner = bare(value)
    held: Iterable[Any] = inner.parameters() if isinstance(inner, nn.Module) else ()
    if isinstance(inner, torch.optim.Optimizer):
        held = (p for group in inner.param_groups for p in group["params"])
    return any(isinstance(p, DTensor) for p in held)


def state_of(name: str, value: Any) -> Any:
    """Return an object's state; of a sharded one, the part that is this rank's.

    Raises:
        UsageError: It has none.
    """
    inner = bare(value)
    if isinstance(inner, Sharded):
        return inner.local_state_dict()
    if isinstance(inner, dict | list) or is_stateful(inner):
        return own_state(cast(Any, inner))
    seen = f"a {type(inner).__qualname__} has no state_dict and load_state_dict"
    raise UsageError(
        f"{name!r} cannot be saved",
        seen=f"{inner.__qualname__} is a class" if isinstance(inner, type) else seen,
        fix="Pass objects that have both, or a dict or list.",
    )


def is_stateful(value: Any) -> bool:
    """Tell whether an object has both `state_dict` and `load_state_dict`; tensors have neither."""
    if isinstance(value, torch.Tensor):  # a state may have thousands; the next line takes 10 us
        return False
    return isinstance(value, Stateful) and not isinstance(value, type)


def own_state(value: Any) -> Any:
    """Return what `state_dict()` returns, for a wrapper that of its module; else `value`.

    Raises:
        UsageError: It is an optimizer of which each rank has a part.
    """
    if not is_stateful(value):
        return value
    inner = bare(value)
    try:
        return inner.state_dict()
    except OptimizerError as e:
        if not isinstance(inner, Sharded):
            raise
        raise UsageError(
            f"each rank has a part of the state of this {type(inner).__qualname__}",
            seen=e.what,
            fix="Save and load get_optimizer_state_dict(model, optimizer), and put it back with "
            "set_optimizer_state_dict (dure.checkpoint.state_dict); or pass the optimizer to "
            "Checkpointer.save and load.",
        ) from e


def check_fits(name: str, value: Any, saved: Any) -> None:
    """Compare an object with the state that was saved under `name`, as far as can be seen.

    These are the tensors of a module, a dict or a list, and the groups that an optimizer's state
    has.

    Args:
        name: The object's.
        value: The object.
        saved: Its state, with a `TensorKind` for each tensor.

    Raises:
        CheckpointMismatch: They differ; the first differences are named.
    """
    inner = bare(value)
    state = cast(Mapping[Any, Any], saved) if isinstance(saved, Mapping) else {}
    wanted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if isinstance(inner, nn.Module):
        tensors = {k: v for k, v in inner.state_dict().items() if isinstance(v, torch.Tensor)}
        wanted = {key: kind_of(tensor) or tensor.dtype for key, tensor in tensors.items()}
        found = {key: kind for key, kind in state.items() if isinstance(kind, TensorKind)}
    elif isinstance(inner, torch.optim.Optimizer):
        if _has_groups(name, inner, state):
            wanted = _groups_of({"param_groups": inner.param_groups})
        found = _groups_of(state)
    both = [key for key in wanted if key in found and found[key] != wanted[key]]
    lines = [f"{key} is {found[key]} in the file, {wanted[key]} here" for key in both]
    lines += [f"{key} is not in the file" for key in wanted if key not in found]
    lines += [f"{key} is in the file only" for key in found if key not in wanted]
    if isinstance(inner, dict | list):
        lines = unlike(inner, saved)
    if lines:
        raise CheckpointMismatch(
            f"{name!r} in the checkpoint does not fit the object",
            seen=few(lines, "; "),
            fix="Load it into the model that was saved, or save in another folder.",
        )


def _groups_of(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return how many parameters the groups of an optimizer's state have; {}: it has no groups."""
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        return {}
    sizes = [
        len(cast(Sized, group["params"]))
        for group in cast(list[Any], groups)
        if isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
    ]
    return {"parameters in groups": sizes} if len(sizes) == len(groups) else {}


def _has_groups(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> bool:
    """Return whether an optimizer's state has groups. Some classes have another form of state."""
    plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    if isinstance(optimizer, Sharded) or (plain and _groups_of(saved)):
        return True
    own = state_of(name, optimizer)
    return isinstance(own, Mapping) and bool(_groups_of(cast(Mapping[Any, Any], own)))


def few(items: Sequence[str], between: str = ", ") -> str:
    """Return the first of several items as text, and the number of the others."""
    more = len(items) - _NUM_SHOWN
    return between.join(items[:_NUM_SHOWN]) + (f"{between}and {more} more" if more > 0 else "")


def load_into(name: str, value: Any, tree: Any, tensor_of: Callable[[str], torch.Tensor]) -> None:
    """Put a saved state back.

    Parameters and buffers of modules, and tensors in dicts and lists, are filled in place,
    directly from the mapped file. Objects that may keep their tensors get copies:
    `tensor_of`'s memory stays as it is.

    Raises:
        CheckpointMismatch: The object refuses the state.
    """
    inner = bare(value)
    what = f"{name!r} does not take the saved state"
    copy = cache(lambda n: tensor_of(n).clone())  # what was one tensor in two places is so again
    try:
        if isinstance(inner, dict | list):
            fill(inner, tree, tensor_of)
            return
        saved: list[Fields] = []

        def fields_of_file(pairs: Any) -> Fields:
            saved.append(Fields(pairs))
            return saved[-1]

        if isinstance(inner, Sharded):
            state = decode(tree, tensor_of, fields_of_file)
        else:
            direct = _read_only(inner, tree) if isinstance(inner, nn.Module) else frozenset[str]()
            state = decode(tree, lambda n: tensor_of(n) if n in direct else copy(n), fields_of_file)
        if saved:
            state = with_instances(state, _state_with_instances(name, inner), name)
        cast(Stateful, inner).load_state_dict(state)
        set_stages(inner, {}, {})
        if isinstance(inner, Sharded):  # it has kept its part of what is mapped
            inner.state.update({k: mapped(v, torch.clone) for k, v in inner.state.items()})
    except DureError as e:
        if not isinstance(e, UsageError):  # a lost peer, a file that cannot be read
            raise
        seen = f"{e.what}: {e.seen}" if e.seen else e.what
        raise CheckpointMismatch(what, seen=seen, fix=e.fix) from e
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise CheckpointMismatch(what, seen=f"{type(e).__name__}: {e}") from e


def _state_with_instances(name: str, value: Any) -> Any:
    """Return an object's state; of an optimizer, also what the first step will make."""
    state = state_of(name, value)
    if isinstance(value, torch.optim.Optimizer) and _groups_of(state):
        made = dict(state["state"])
        for packed, group in zip(state["param_groups"], value.param_groups, strict=True):
            for number, parameter in zip(packed["params"], group["params"], strict=True):
                if number not in made:
                    with suppress(UsageError):
                        made[number] = fresh_state(value, group, parameter)
        state = {**state, "state": made}
    return state


def _read_only(module: nn.Module, tree: Any) -> frozenset[str]:
    """Return the names of those tensors of a saved state that the module only copies from.

    They are its parameters and buffers, except in submodules with custom code for loading, which
    may keep, or write, its argument. So may `set_extra_state`.
    """
    plain: set[str] = set()
    if type(module).load_state_dict is nn.Module.load_state_dict:
        plain.update(_plainly_loaded(module, ""))
    read: Counter[str] = Counter()
    for key, node in entries_of(tree):
        if isinstance(key, str) and key in plain:
            decode(node, lambda name: read.update([name]))
    everywhere: Counter[str] = Counter()
    decode(tree, lambda name: everywhere.update([name]))
    return frozenset(name for name in read if read[name] == everywhere[name])


def _plainly_loaded(module: nn.Module, prefix: str) -> Iterator[str]:
    """Return the keys of the parameters and buffers that torch's own code loads."""
    load: Any = type(module)._load_from_state_dict  # pyright: ignore[reportPrivateUsage]
    is_custom = not load.__module__.startswith("torch.nn.modules.")
    if is_custom or module._load_state_dict_pre_hooks:  # pyright: ignore[reportPrivateUsage]
        return
    for name in (*module._parameters, *module._buffers):  # pyright: ignore[reportPrivateUsage]
        yield prefix + name
    for name, child in module.named_children():
        yield from _plainly_loaded(child, f"{prefix}{name}.")
