"""The state of a model and its optimizers under the user's names, as torch's functions give it.

Names are those of the module without wrappers (`names`), and an optimizer's state is keyed by the
name of its parameter:

    {"state": {"layer.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"lr": ..., "params": ["layer.weight", ...]}]}

So it fits any wrappers, any order of parameters and, in a checkpoint, any sharding. With
``flatten_optimizer_state_dict`` options are given for each parameter, and other groups fit as well:

    {"state.layer.weight.exp_avg": ..., "param_groups.layer.weight.lr": ...}

Tensors in what `get_...` returns are the live ones; a `load` into them fills model and optimizer.
The state of parameters that have not been stepped is made for it (`fresh_state`), and belongs to
the optimizer after `set_...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dure.checkpoint.fresh_state import fresh_state
from dure.checkpoint.replaced_methods import replace_methods
from dure.checkpoint.state_forms import State
from dure.checkpoint.state_view import (
    IncompatibleKeys,
    Optimizers,
    StateDictOptions,
    StateView,
    as_tuple,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "IncompatibleKeys",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "_init_optim_state",
    "_patch_model_state_dict",
    "_patch_optimizer_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

# torch's names of types, for annotations.
FQNS_T = set[str]
PrimitiveType = torch.Tensor | int | float | str
"""A leaf of a state."""
ValueType = PrimitiveType | list[PrimitiveType] | tuple[PrimitiveType] | dict[str, Any]
"""A value of a state."""
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[State, State]:
    """Return the model's state and the optimizers', under the user's names.

    Args:
        model: In any wrappers, sharded or not.
        optimizers: One or several, which update its parameters.
        submodules: Only these modules of it, and the optimizers' state of their parameters.
        options: See `StateDictOptions`.

    Returns:
        What `get_model_state_dict` and `get_optimizer_state_dict` return.

    Raises:
        UsageError: As these two.

    Collective with ``full_state_dict``: the ranks of the parameters' meshes.

    Example:
        ```python
        from dure.checkpoint.state_dict import get_state_dict, set_state_dict

        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        weights, moments = get_state_dict(model, optimizer)
        assert set(weights) == set(moments["state"]) == {"weight", "bias"}
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        ```
    """
    view = StateView(model, options)
    return view.model_state(submodules), view.optimizer_state(optimizers, submodules)


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> State:
    """Return the model's parameters and persistent buffers, under the user's names.

    Args:
        model: In any wrappers, sharded or not.
        submodules: Only these modules of it.
        options: See `StateDictOptions`.

    Raises:
        UsageError: Two have the same name; a submodule is of another model.

    Collective with ``full_state_dict``: the ranks of the parameters' meshes.

    Example:
        ```python
        from dure.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        net = torch.nn.Linear(4, 2)
        fsdp.fully_shard(net)
        sharded = get_model_state_dict(net)                  # DTensors: this rank's rows
        full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        assert full["weight"].shape == (2, 4) and sharded["weight"].to_local().shape == (1, 4)
        ```
    """
    return StateView(model, options).model_state(submodules)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> State:
    """Return the state of optimizers, keyed by the user's names of the model's parameters.

    Trainable parameters that have not been stepped have the state that a first step would make;
    the optimizer is not changed. Frozen ones have what there is, or nothing. Of a
    `ZeroRedundancyOptimizer` each rank has the state of its parameters; `save` writes all.

    Args:
        model: The model whose parameters they update.
        optimizers: One or several.
        submodules: Only parameters of these modules.
        options: See `StateDictOptions`.

    Returns:
        The state: `state` by names of parameters, and `param_groups` with names.

    Raises:
        UsageError: An optimizer has parameters that the model has not, or another's, or state
            beside its parameters; ``full_state_dict`` of a `ZeroRedundancyOptimizer`.

    Collective with ``full_state_dict``: the ranks of the parameters' meshes.

    Example:
        ```python
        from dure.checkpoint import state_dict as states

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        found = states.get_optimizer_state_dict(model, optimizer)
        assert sorted(found["state"]) == ["bias", "weight"]
        ```
    """
    return StateView(model, options).optimizer_state(optimizers, submodules)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Put back the model's state and the optimizers'.

    Args:
        model: In any wrappers, sharded or not. Tensors on the meta device are replaced.
        optimizers: One or several, which update its parameters.
        model_state_dict: As for `set_model_state_dict`; if it is empty, only the optimizers are
            set.
        optim_state_dict: As for `set_optimizer_state_dict`.
        options: See `StateDictOptions`.

    Returns:
        The model's names that were missing, and names that it does not have.

    Raises:
        CheckpointMismatch: As `set_model_state_dict` and `set_optimizer_state_dict`.
        UsageError: As these two.

    Collective with ``broadcast_from_rank0``: all ranks.

    Example:
        ```python
        weights, moments = states.get_state_dict(model, optimizer)
        other = torch.nn.Linear(2, 1)
        other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
        states.set_state_dict(
            other, other_optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        assert torch.equal(other.weight, model.weight)
        assert other_optimizer.param_groups[0]["lr"] == 0.1
        ```
    """
    view = StateView(model, options)
    has_model = model_state_dict or (options is not None and options.broadcast_from_rank0)
    keys = view.set_model(model_state_dict) if has_model else IncompatibleKeys([], [])
    view.set_optimizers(optimizers, optim_state_dict)
    return keys


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Put the state of a model back, in any wrappers.

    Args:
        model: In any wrappers, sharded or not. Tensors on the meta device are replaced.
        model_state_dict: By the user's names, or by module with names below it. Whole tensors are
            cut where the model has DTensors.
        options: See `StateDictOptions`.

    Returns:
        Names that were missing, and names that the model does not have.

    Raises:
        CheckpointMismatch: Shapes differ, or with ``strict`` names.
        UsageError: ``broadcast_from_rank0`` without ``full_state_dict``.

    Collective with ``broadcast_from_rank0``: all ranks.

    Example:
        ```python
        from dure.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        ddp = dist.DistributedDataParallel(torch.nn.Linear(4, 2))
        state = get_model_state_dict(ddp)
        assert list(state) == ["weight", "bias"]  # not module.weight
        set_model_state_dict(torch.nn.Linear(4, 2), state)
        ```
    """
    return StateView(model, options).set_model(model_state_dict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Put the state of optimizers back: each takes that of its parameters.

    Parameters that are frozen take none. Without ``strict``, parameters whose state is missing
    keep theirs, or begin at their first step.

    Args:
        model: The model whose parameters they update.
        optimizers: One or several.
        optim_state_dict: As `get_optimizer_state_dict` returns it, with full tensors or DTensors.
        options: See `StateDictOptions`.

    Returns:
        Names of parameters whose state was missing, and of those that no optimizer has.

    Raises:
        CheckpointMismatch: With ``strict``, the state of a trainable parameter is missing, or
            parameters of one group had different options.
        UsageError: As `get_optimizer_state_dict`; ``broadcast_from_rank0`` without
            ``full_state_dict``.

    Collective with ``broadcast_from_rank0``: all ranks.

    Example:
        ```python
        fresh = torch.optim.Adam(model.parameters(), lr=0.5)
        states.set_optimizer_state_dict(model, fresh, moments)
        assert fresh.param_groups[0]["lr"] == 0.1
        ```
    """
    return StateView(model, options).set_optimizers(optimizers, optim_state_dict)


def _init_optim_state(optim: torch.optim.Optimizer) -> None:
    """Give an optimizer the state of its first step, unless it has some; torch's private name.

    Args:
        optim: Any optimizer of torch.

    Example:
        ```python
        from dure.checkpoint import state_dict as states

        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight])
        states._init_optim_state(optimizer)
        assert optimizer.state[weight]["exp_avg"].tolist() == [0.0, 0.0]
        assert weight.tolist() == [1.0, 1.0]  # as it was
        ```
    """
    if optim.state:
        return
    for group in optim.param_groups:
        for parameter in group["params"]:
            state = fresh_state(optim, group, parameter) if parameter.requires_grad else {}
            if state:
                optim.state[parameter] = state


def _patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Replace a model's `state_dict` and `load_state_dict`.

    By `get_model_state_dict` and `set_model_state_dict`. A private name of torch that programs use.

    Args:
        model: In any wrappers, sharded or not.
        options: See `StateDictOptions`.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(2, 1))
        states._patch_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
        assert model.state_dict()["weight"].shape == (1, 2)  # the full tensor
        ```
    """
    replace_methods(
        model,
        lambda: get_model_state_dict(model, options=options),
        lambda state_dict: set_model_state_dict(model, state_dict, options=options),
    )


def _patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Replace each optimizer's `state_dict` and `load_state_dict`.

    By `get_optimizer_state_dict` and `set_optimizer_state_dict` of all of them. A private name
    of torch that programs use.

    Args:
        model: The model whose parameters they update.
        optimizers: One or several.
        options: See `StateDictOptions`.

    Example:
        ```python
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        states._patch_optimizer_state_dict(model, optimizers=optimizer)
        assert optimizer.state_dict()["param_groups"][0]["params"] == ["weight", "bias"]
        ```
    """
    several = as_tuple(optimizers)
    for optimizer in several:
        replace_methods(
            optimizer,
            lambda: get_optimizer_state_dict(model, several, options=options),
            lambda state_dict: set_optimizer_state_dict(
                model, several, state_dict, options=options
            ),
        )
