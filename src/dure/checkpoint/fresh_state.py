"""The state that an optimizer will have of a parameter, before it has stepped.

Optimizers make their state at the first step. To load a checkpoint into the tensors of a state,
there must be one. It is made by a step of a twin of the optimizer that has one parameter, all
zeros, with a gradient of zeros: the optimizer, its parameters and its hooks are not touched. What
counts steps is then put back, so that continuing with it is the same as starting without.

If a running program loads an older checkpoint, its optimizer may have more state than the
checkpoint (of parameters first stepped later) or less. `state_to_fill` returns the state of
a parameter with exactly the entries that the checkpoint has, and reuses the tensors that exist.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from dure.checkpoint.dataclass_fields import Fields, fields_of, item_at, with_instances
from dure.checkpoint.slice_files import TensorKind
from dure.checkpoint.tree import Leaf, Named
from dure.comm.world import current_world
from dure.errors import CheckpointMismatch, DureError, UsageError
from dure.tensor import DTensor

__all__ = ["fresh_state", "like_saved", "state_to_fill", "with_memory"]

_CONTAINERS = dict, list, set, deque
_BEFORE_STEPS = {"step": 0, "mu_product": 1}


def fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return what the first step will make, with nothing learned in it.

    Args:
        optimizer: Any of torch's that updates each parameter by itself.
        group: The parameter's group.
        parameter: A parameter; its state has its mesh and placements.

    Raises:
        UsageError: The optimizer does not step so.

    Cost:
        Memory of the parameter twice, for the moment.
    """
    scratch = nn.Parameter(torch.zeros_like(parameter.detach()))
    scratch.grad = torch.zeros_like(scratch.detach())
    kind = type(optimizer)
    twin = cast(Any, object.__new__(kind))
    # Shallow copies of what a step may append to: tensors in them stay shared.
    vars(twin).update(
        {k: copy(v) if isinstance(v, _CONTAINERS) else v for k, v in vars(optimizer).items()}
    )
    twin.state = defaultdict[Any, Any](dict)
    twin.param_groups = [{**group, "params": [scratch]}]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    try:
        cast(Any, kind).step(twin)  # the class's: an instance's may be a scheduler's
    except Exception as e:
        if isinstance(e, DureError) and not isinstance(e, UsageError):
            raise  # such as a lost peer
        raise UsageError(
            f"the state of a {kind.__qualname__} is not known before it has stepped",
            seen=f"{type(e).__name__}: {e}",
            fix="Step it once, with gradients of zeros and lr=0.",
        ) from e
    state = dict(cast(dict[str, Any], twin.state.get(scratch, {})))
    for key, value in _BEFORE_STEPS.items():
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    return state


def state_to_fill(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    saved: Any,
    kinds: Mapping[str, TensorKind],
) -> Any:
    """Return a parameter's state with the structure and values of `saved`, and tensors to fill.

    A tensor is the one that the optimizer has, or else the one that its first step would make, or
    else a new one. New tensors of the parameter's shape are sharded as the parameter is.

    Args:
        optimizer: It is not changed.
        group: The parameter's group.
        parameter: The parameter.
        saved: Its state in a checkpoint, with a `Named` for each tensor.
        kinds: The kind of each of these tensors.

    Raises:
        CheckpointMismatch: It is not known how a tensor of the checkpoint is sharded.
    """

    @cache
    def fresh() -> dict[str, Any]:
        try:
            return fresh_state(optimizer, group, parameter)
        except UsageError:
            return {}

    def made(kind: TensorKind) -> torch.Tensor:
        if not isinstance(parameter, DTensor) or not kind.shape:
            return torch.empty(kind.shape, dtype=kind.torch_dtype, device=parameter.device)
        if kind.shape != parameter.shape:
            raise CheckpointMismatch(
                f"the state of a {type(optimizer).__qualname__} is not known before it has stepped",
                seen=f"{kind} in the checkpoint, of a parameter of shape {list(parameter.shape)}",
                fix="Step it once, with gradients of zeros and lr=0.",
            )
        return torch.empty_like(parameter.detach(), dtype=kind.torch_dtype)

    def fill(saved: Any, *found: Callable[[], Any]) -> Any:
        if isinstance(saved, Named):
            kind = kinds[saved]
            for get in found:
                tensor = get()
                if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == kind.shape:
                    return tensor
            return made(kind)
        if isinstance(saved, Mapping):
            items = cast(Mapping[Any, Any], saved).items()
        elif isinstance(saved, list | tuple):
            items = enumerate(cast(list[Any], saved))
        else:
            return saved
        inner = {
            key: fill(value, *(lambda get=get, key=key: item_at(get(), key) for get in found))
            for key, value in items
        }
        if isinstance(saved, Fields):
            instances = (get() for get in found)
            return _instance(inner, next((i for i in instances if fields_of(i) is not None), None))
        return inner if isinstance(saved, Mapping) else type(saved)(inner.values())

    return fill(saved, lambda: optimizer.state.get(parameter), fresh)


def _instance(fields: dict[Any, Any], found: Any) -> Any:
    """Return a copy of an instance that is to be filled; a dict if there is none."""
    try:
        return with_instances(Fields(fields), found, "a part of an optimizer's state")
    except ValueError as e:
        raise CheckpointMismatch("the checkpoint is of another optimizer", seen=f"{e}") from e


def like_saved(saved: Any, found: Any, kinds: Mapping[str, TensorKind]) -> Any:
    """Return `saved` with the tensors of `found`, or new ones, that are to be filled."""
    if isinstance(saved, Named):
        shape, dtype = kinds[saved].shape, kinds[saved].torch_dtype
        fits = isinstance(found, torch.Tensor) and tuple(found.shape) == shape
        return found if fits else torch.empty(shape, dtype=dtype, device="cpu")
    if isinstance(saved, Mapping):
        entries = cast(Mapping[Any, Any], saved).items()
        inner = {key: like_saved(value, item_at(found, key), kinds) for key, value in entries}
        return _instance(inner, found) if isinstance(saved, Fields) else inner
    if type(saved) in (list, tuple):
        items = enumerate(saved)
        return type(saved)(like_saved(value, item_at(found, n), kinds) for n, value in items)
    return saved


def with_memory(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return leaves that replace those of tensors on the meta device: empty tensors like them.

    A DTensor gets memory on its mesh's devices, a plain tensor on those of the default group.
    """
    group = current_world().default
    kinds = {"cpu"} if group is None else group.device_types
    default = "cpu" if "cpu" in kinds else min(kinds)
    made: dict[str, Leaf] = {}
    for name, leaf in leaves.items():
        tensor = leaf.value
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else default
            made[name] = Leaf(leaf.path, torch.empty_like(tensor.detach(), device=kind))
    return made
