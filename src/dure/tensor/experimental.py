"""Implicit replication, functions on parts, custom sharding rules, and context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.comm.pending import wait_tensor
from dure.errors import MeshError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import dispatch
from dure.tensor.call import AxisStrategy, Op, OpCall, schema_of
from dure.tensor.context_parallel import (
    context_parallel,
    context_parallel_batch,
    context_parallel_unshard,
    positions_of,
)
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.registry import rule
from dure.tensor.spec import DTensorSpec, as_placements, import_instead_of, resolved
from dure.tensor.state import replicating as implicit_replication
from dure.torch_private import pytree

__all__ = [
    "context_parallel",
    "context_parallel_batch",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "positions_of",
    "register_sharding",
]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs `func` on their parts.

    Args:
        func: A function of plain tensors. If None, a decorator is returned.
        out_placements: The placements of the results: a tuple with one list for each result, None
            for results that are not tensors; or one list for a single result.
        in_placements: The required placements of the positional arguments: a tuple with one list
            for each, None for arguments that are not DTensors. If None, placements are not checked.
        in_grad_placements: The placements of the gradients of the arguments' parts, if they differ
            from `in_placements`: ``[Partial()]`` for a replicated argument that the ranks use
            differently.
        device_mesh: The mesh of the results; if None, that of the first DTensor.
        redistribute_inputs: Redistribute arguments to `in_placements` instead of raising.

    Returns:
        The function. Called without DTensors it calls `func` directly.

    Raises:
        PlacementError: An argument does not have the required placements.
        MeshError: The arguments are on different meshes.
        UsageError: The number of placements differs from that of arguments or results.
        ShapeError: As `DTensor.from_local`, which wraps the results.

    Collective:
        The collectives of `func`, and redistributions.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh
        from dure.tensor.experimental import local_map

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        double = local_map(lambda part: 2 * part, [Shard(0)], ([Shard(0)],))
        assert double(x).full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0]
        ```
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    run = func

    @functools.wraps(run)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        values, structure = pytree.tree_flatten(args)
        named, named_structure = pytree.tree_flatten(kwargs)
        mesh = device_mesh
        for value in (*values, *named):
            mesh = value.device_mesh if mesh is None and isinstance(value, DTensor) else mesh
        if not any(isinstance(value, DTensor) for value in (*values, *named)):
            return run(*args, **kwargs)
        assert mesh is not None
        wanted = _one_each(in_placements, len(values), "in_placements")
        grads = _one_each(in_grad_placements, len(values), "in_grad_placements")
        parts = [
            _part(value, number, mesh, want, grad, redistribute_inputs, in_placements is not None)
            for number, (value, want, grad) in enumerate(zip(values, wanted, grads, strict=True))
        ]
        more = [v.to_local() if isinstance(v, DTensor) else v for v in named]
        result = run(
            *pytree.tree_unflatten(parts, structure),
            **pytree.tree_unflatten(more, named_structure),
        )
        return _wrapped(result, mesh, out_placements)

    return mapped


def _one_each(given: tuple[Placements, ...] | None, count: int, name: str) -> Sequence[Placements]:
    if given is None:
        return (None,) * count
    if len(given) != count:
        raise UsageError(
            f"{name} must have one entry for each positional argument, None for those that are not "
            "DTensors",
            op="local_map",
            seen=f"{len(given)} entries for {count} arguments",
        )
    return given


def _part(
    value: Any,
    number: int,
    mesh: DeviceMesh,
    wanted: Placements,
    grads: Placements,
    redistribute: bool,
    looked_at: bool,
) -> Any:
    """Return the value that is passed to `func` for an argument."""
    if not isinstance(value, DTensor):
        if wanted is not None and not isinstance(value, torch.Tensor):
            raise UsageError(
                "in_placements must be None for an argument that is not a tensor",
                op="local_map",
                seen=f"argument {number} is {value!r}",
            )
        return value
    if value.device_mesh != mesh:
        raise MeshError(
            "the arguments are on different meshes",
            op="local_map",
            seen=f"argument {number} on {value.device_mesh!r}, others on {mesh!r}",
        )
    if looked_at:
        if wanted is None:
            raise UsageError(
                "in_placements must have placements for each DTensor",
                op="local_map",
                seen=f"None for argument {number}, {value.spec}",
            )
        target = as_placements(wanted, mesh, value.ndim, "local_map")
        if value.placements != target:
            if not redistribute:
                raise PlacementError(
                    "an argument does not have the placements of in_placements",
                    op="local_map",
                    seen=f"argument {number} is {value.spec}, expected {target}",
                    fix="Redistribute it, or pass redistribute_inputs=True.",
                )
            value = value.redistribute(placements=target)
    return wait_tensor(value.to_local(grad_placements=grads))


def _wrapped(result: Any, mesh: DeviceMesh, placements: Any) -> Any:
    """Return results as DTensors."""
    values, structure = pytree.tree_flatten(result)
    given: Any = placements if isinstance(placements, tuple) else (placements,)
    if given and all(isinstance(one, Placement) for one in given):
        given = (given,)
    if len(given) != len(values):
        raise UsageError(
            "out_placements must have one entry for each result",
            op="local_map",
            seen=f"{len(given)} entries for {len(values)} results",
        )
    made: list[Any] = []
    for number, (value, where) in enumerate(zip(values, given, strict=True)):
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not plain and (where is not None or isinstance(value, DTensor)):
            raise UsageError(
                "the function must return plain tensors, and out_placements must be None for other "
                "results",
                op="local_map",
                seen=f"result {number} is {type(value).__name__}, its placements {where}",
            )
        made.append(DTensor.from_local(value, mesh, where) if plain else value)
    return pytree.tree_unflatten(made, structure)


def register_sharding(op: Op | list[Op]) -> Callable[..., Any]:
    """Register the decorated function as the sharding rule of an operator, replacing any other.

    The function is called with the operator's arguments; each DTensor is replaced by an object with
    ``shape``, ``ndim`` and ``placements``. It returns the valid placements on one mesh axis, as a
    list of pairs: a list of the results' placements, and a list of the arguments' placements, with
    None for arguments that are not tensors. Dimensions may count from the end: ``Shard(-1)``. The
    fully replicated strategy is always valid and need not be listed.

    Args:
        op: The operator, or a list of operators.

    Returns:
        A decorator.

    Raises:
        UsageError: When the operator is called: a strategy with a wrong number of placements.
        PlacementError: When the operator is called: a dimension that the tensor does not have.

    Example:
        ```python
        from dure.tensor.experimental import register_sharding

        @register_sharding(torch.ops.aten.cumprod.default)
        def cumprod(x, dim, dtype=None):
            return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim]
        ```
    """
    ops = op if isinstance(op, list) else [op]

    def register(strategies_of: Callable[..., Any]) -> Callable[..., Any]:
        def strategies(call: OpCall) -> list[AxisStrategy]:
            found = strategies_of(*call.args, **call.kwargs)
            return [_strategy(call, list(outputs), list(inputs)) for outputs, inputs in found]

        rule(*ops, contiguous=True)(strategies)
        dispatch.forget_plans()
        return strategies_of

    return register


def _strategy(call: OpCall, outputs: list[Any], inputs: list[Any]) -> AxisStrategy:
    """Return a strategy from the form of `register_sharding`: placements of all arguments."""
    slots = [one for arg in (*call.args, *call.kwargs.values()) for one in _entries(arg)]
    if len(inputs) < len(slots):  # arguments at the end may be left out
        inputs = [*inputs, *(None for _ in slots[len(inputs) :])]
    if len(inputs) > len(schema_of(call.op).names) + len(slots) or len(outputs) < len(call.outputs):
        raise UsageError(
            "a strategy must have a placement for each result and each argument",
            op=call.name,
            seen=f"{outputs} and {inputs} for {len(call.outputs)} results",
        )
    given: list[Placement] = []
    for slot, placement in zip(slots, inputs, strict=False):
        if isinstance(slot, DTensorSpec):
            given.append(_of_user(placement, slot.ndim, call))
    made = [_of_user(one, _ndim(call, number), call) for number, one in enumerate(outputs)]
    return AxisStrategy(tuple(given), tuple(made))


def _ndim(call: OpCall, number: int) -> int:
    """Return the number of dimensions of a result; 0 if it is not a tensor."""
    meta = call.outputs[number] if number < len(call.outputs) else None
    return 0 if meta is None else len(meta.shape)


def _of_user(placement: Any, ndim: int, call: OpCall) -> Placement:
    """Return a placement of a strategy with its dimension counted from 0; None is replicated."""
    if placement is None:
        return Replicate()
    if not isinstance(placement, Placement):
        raise PlacementError(
            "placements of a strategy must be Shard, Replicate or Partial of dure.tensor, or None",
            op=call.name,
            seen=f"{placement!r}, a {type(placement).__module__}.{type(placement).__name__}",
            fix=import_instead_of(placement),
        )
    return resolved(placement, ndim, call.name)


def _entries(arg: Any) -> list[Any]:
    """Return the entries of a list of tensors, or any other argument in a list."""
    if isinstance(arg, (list, tuple)) and any(isinstance(one, DTensorSpec) for one in arg):
        return list(arg)  # pyright: ignore[reportUnknownArgumentType]
    return [arg]
