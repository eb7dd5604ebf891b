"""Plain tensors beside DTensors, functions on parts, rules of users' own, context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dure.comm.pending import wait_tensor
from dure.errors import MeshError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import dispatch
from dure.tensor.call import Op, OpCall, Strategy, schema_of
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
        func: A function of plain tensors. Without it a decorator is returned.
        out_placements: How each value that it returns lies, None for what is no tensor: a tuple
            with one list for each, or one list for a single value.
        in_placements: How each positional argument must lie, as a tuple; None for what is no
            DTensor. Nothing is looked at without it.
        in_grad_placements: How the gradient of each argument's part lies, where it is not as the
            argument: a replicated one that ranks use differently has a gradient of terms,
            ``[Partial()]``.
        device_mesh: Of the results; that of the first DTensor where None.
        redistribute_inputs: Bring arguments to `in_placements`; without it others raise.

    Returns:
        The function. If it is called with plain tensors alone it is `func`.

    Raises:
        PlacementError: An argument lies otherwise.
        MeshError: An argument is of another mesh.
        UsageError: Another number of placements than of arguments or results.
        ShapeError: See `DTensor.from_local`, which wraps the results.

    Collective:
        What `func` calls, and redistributions.
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
            f"{name} has one entry for each positional argument, None for what is no DTensor",
            op="local_map",
            seen=f"{len(given)} for {count}",
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
    """Return what `func` is given for an argument."""
    if not isinstance(value, DTensor):
        if wanted is not None and not isinstance(value, torch.Tensor):
            raise UsageError(
                "in_placements is None for what is no tensor",
                op="local_map",
                seen=f"argument {number} is {value!r}",
            )
        return value
    if value.device_mesh != mesh:
        raise MeshError(
            "the arguments of a local_map are of one mesh",
            op="local_map",
            seen=f"argument {number}: {value.device_mesh!r}, others: {mesh!r}",
        )
    if looked_at:
        if wanted is None:
            raise UsageError(
                "in_placements says how each DTensor must lie",
                op="local_map",
                seen=f"None for argument {number}, {value.spec}",
            )
        target = as_placements(wanted, mesh, value.ndim, "local_map")
        if value.placements != target:
            if not redistribute:
                raise PlacementError(
                    "an argument does not lie as in_placements says",
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
            "out_placements has one entry for each result",
            op="local_map",
            seen=f"{len(given)} for {len(values)}",
        )
    made: list[Any] = []
    for number, (value, where) in enumerate(zip(values, given, strict=True)):
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not plain and (where is not None or isinstance(value, DTensor)):
            raise UsageError(
                "a local_map returns plain tensors, and None is the placement of what is none",
                op="local_map",
                seen=f"result {number} is {type(value).__name__}, its placements {where}",
            )
        made.append(DTensor.from_local(value, mesh, where) if plain else value)
    return pytree.tree_unflatten(made, structure)


def register_sharding(op: Op | list[Op]) -> Callable[..., Any]:
    """Register the decorated function as the sharding rule of an operator, over any it has.

    The function takes the operator's arguments, with an object that has ``shape``, ``ndim`` and
    ``placements`` in the place of each DTensor. It returns what is legal on one mesh axis: a list
    of pairs, the placements of the results and those of the arguments, None for what is no tensor.
    That all is replicated need not be said.

        @register_sharding(torch.ops.aten._softmax.default)
        def softmax(x, dim, half_to_float):
            return [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim]

    Args:
        op: The operator, or several.

    Dimensions may count from the end: ``Shard(-1)``.

    Raises:
        UsageError: When the operator is called: a strategy with other numbers of placements.
        PlacementError: When the operator is called: a dimension that the tensor does not have.
    """
    ops = op if isinstance(op, list) else [op]

    def register(strategies_of: Callable[..., Any]) -> Callable[..., Any]:
        def strategies(call: OpCall) -> list[Strategy]:
            found = strategies_of(*call.args, **call.kwargs)
            return [_strategy(call, list(outputs), list(inputs)) for outputs, inputs in found]

        rule(*ops, contiguous=True)(strategies)
        dispatch.forget_plans()
        return strategies_of

    return register


def _strategy(call: OpCall, outputs: list[Any], inputs: list[Any]) -> Strategy:
    """Return a strategy that was written in torch's way: placements of all that is given."""
    slots = [one for arg in (*call.args, *call.kwargs.values()) for one in _entries(arg)]
    if len(inputs) < len(slots):  # arguments at the end may be left out
        inputs = [*inputs, *(None for _ in slots[len(inputs) :])]
    if len(inputs) > len(schema_of(call.op).names) + len(slots) or len(outputs) < len(call.outputs):
        raise UsageError(
            "a strategy has a placement for each result and each argument",
            op=call.name,
            seen=f"{outputs} and {inputs} for {len(call.outputs)} results",
        )
    given: list[Placement] = []
    for slot, placement in zip(slots, inputs, strict=False):
        if isinstance(slot, DTensorSpec):
            given.append(_of_user(placement, slot.ndim, call))
    made = [_of_user(one, _ndim(call, number), call) for number, one in enumerate(outputs)]
    return Strategy(tuple(given), tuple(made))


def _ndim(call: OpCall, number: int) -> int:
    """Return how many dimensions a result has; 0 of what is no tensor."""
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
    """Return an argument as a list: those of a list of tensors, or itself."""
    if isinstance(arg, (list, tuple)) and any(isinstance(one, DTensorSpec) for one in arg):
        return list(arg)  # pyright: ignore[reportUnknownArgumentType]
    return [arg]
