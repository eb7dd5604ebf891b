"""How an operator on DTensors is run: look up, move, compute on the parts, wrap.

The first call of an operator with certain specs asks the rules (*miss*): which placements its
operands must have, and which its results get. The answer is kept as an `OperatorPlan` (planning.py)
under the operator, the specs and the other arguments; every later call of that kind (*hit*) costs
one dictionary look-up, the operator on the parts, and the wrapping of its result. `dispatch` here
defines what a hit does; the extension `_hits` (csrc/dispatch/hits.cpp) does the same faster.

An operator without a rule is decomposed, or computed on full tensors (without_rule.py). Plain
tensors beside DTensors are refused or taken as replicated (plain_tensors.py).

A view whose source has to be moved is a copy, and so is a view that the strides of a part do not
allow, although those of the full tensor do. A copy cannot be written, nor read after its source was
written: either raises `PlacementError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.untraced import untraced_below
from dure.comm.world import when_left
from dure.errors import MeshError, PlacementError
from dure.tensor.call import Op, OpCall, Place, argument_at, fill, schema_of
from dure.tensor.expand import written
from dure.tensor.plain_tensors import full_numbers, with_replicated, writes_plain
from dure.tensor.planning import (
    OperatorPlan,
    depends_on_default_dtype,
    depends_on_values,
    make_plan,
    place_of,
    restore,
)
from dure.tensor.redistribute import redistribute
from dure.tensor.registry import OtherStrides, Rule, by_value, rule_of
from dure.tensor.results import forget_results, results_of, wrapped_results
from dure.tensor.spec import DTensorSpec
from dure.tensor.without_rule import run_without_rule
from dure.tensor.wrapping import wrap

if TYPE_CHECKING:
    from dure.tensor.dtensor import DTensor

__all__ = [
    "bind",
    "check_copy",
    "dispatch",
    "forget_plans",
    "has_own_way",
    "plans",
    "special",
]

_MOST_PLANS = 1 << 16
plans: dict[Any, OperatorPlan] = {}
when_left.append(plans.clear)
_special: dict[Op | torch.Tag, Callable[..., Any]] = {}
"""Operators, or all with a tag, that run in a way of their own: called with (op, args, kwargs)."""
_lists: set[Op | torch.Tag] = set()
"""Those on lists, which may have plain tensors too; nothing is looked up first."""
_DTensor: type[DTensor]


def bind(cls: type[DTensor]) -> None:
    """Set the class `DTensor`, which is defined in a file that imports this one."""
    global _DTensor
    _DTensor = cls


def special(*ops: Op | torch.Tag, lists: bool = False) -> Callable[..., Any]:
    """Register the decorated function as the way to run these operators, which may be on lists."""

    def register(run: Callable[..., Any]) -> Any:
        _special.update(dict.fromkeys(ops, run))
        _lists.update(ops if lists else ())
        return run

    return register


def forget_plans() -> None:
    """Ask the rules anew for every kind of call: a rule has changed."""
    plans.clear()
    forget_results()


def has_own_way(op: Op) -> bool:
    """Return whether an operator is run neither by a rule nor by what is done without one."""
    return op in _special


@untraced_below
def dispatch(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an operator, some of whose arguments are DTensors."""
    if op in _lists:
        return _special[op](op, args, kwargs or {})
    dtensor = _DTensor
    copied = False
    key: list[Any] = [op]
    for arg in args:
        if type(arg) is dtensor:
            key.append(arg.spec)
            if arg.copied_at is not None:
                copied = True
        else:
            key.append(_key_of(op, arg))
    if kwargs:
        for name, arg in kwargs.items():
            key += name, _key_of(op, arg)
    try:
        plan = plans.get(tuple(key))
    except TypeError:
        plan = None
    if plan is None:  # not in the handler: an error of the operator has nothing to do with it
        return _miss(op, args, kwargs or {}, key)
    if copied:
        _check_copies(op, *_operands(args, kwargs or {}))
        return _run(plan, args, kwargs or {})
    output, returned = plan.output, plan.written
    if output is None and returned is None:
        return _run(plan, args, kwargs or {})
    values = [a.part if type(a) is dtensor else a for a in args]
    result: Any
    try:
        result = plan.local(*values, **kwargs) if kwargs else plan.local(*values)
    except OtherStrides:
        return _run(plan, args, kwargs or {})
    if output is None:
        assert returned is not None
        return args[returned]
    if isinstance(output, tuple):
        pairs = zip(result, output, strict=True)
        return tuple([r if s is None or r is None else wrap(r, s) for r, s in pairs])
    return wrap(result, output)


def _key_of(op: Op, arg: Any) -> Any:
    """Return what stands for an argument in a key.

    Of floats the kind, since rules do not look at them, unless they say so. Plain tensors, and
    views that are copies, have a key that hits never.
    """
    kind = type(arg)
    if kind is int or arg is None:
        return arg
    if kind is float:
        return (kind, arg) if op in by_value else kind
    if kind is _DTensor:
        return arg.spec if arg.copied_at is None else []
    if kind is list or kind is tuple:
        return tuple([_key_of(op, a) for a in arg])
    return (kind, arg.shape, []) if isinstance(arg, torch.Tensor) else (kind, arg)


# ---- the first call of a kind --------------------------------------------------------------------


def _miss(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: list[Any],
) -> Any:
    operands, places = _operands(args, kwargs)
    plain = [t for t in operands if type(t) is not _DTensor]
    if plain:
        if writes_plain(op, operands, places):
            named = dict(zip(kwargs, full_numbers(kwargs.values()), strict=True))
            return op(*full_numbers(args), **named)
        return dispatch(op, *with_replicated(op, args, kwargs, operands, places))
    _check_copies(op, operands, places)
    specs = tuple(t.spec for t in operands)
    if op is torch.ops.aten.stack.default and _are_numbers_of_meshes(specs):
        whole = [redistribute(t.part, t.spec, t.spec.replicated()) for t in operands]
        return op(whole, *args[1:], **kwargs)
    _check_meshes(op, specs)
    in_place_view = torch.Tag.inplace_view in op.tags
    run = _special.get(torch.Tag.inplace_view if in_place_view else op)
    if run is not None:
        return run(op, args, kwargs)
    bare, named = fill(args, kwargs, places, specs)
    call = OpCall(op, tuple(bare), named, specs, places)
    found = rule_of(op)
    if found is None or depends_on_values(call):
        if specs[0].coordinate is not None:
            return run_without_rule(call, args, kwargs)
        returned = schema_of(op).returned
        if written(call) and all(returned):  # nothing is to be written here
            places = [place_of(call, name) for name in returned]
            if None not in places:
                own = tuple(
                    argument_at((args, kwargs), place) for place in places if place is not None
                )
                return own[0] if len(own) == 1 else own or None
        found = _UNKNOWN
    call.outputs = results_of(call, key)
    plan = make_plan(call, found)
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    if not depends_on_default_dtype(call):
        with suppress(TypeError):
            plans[tuple(key)] = plan
    return _run(plan, args, kwargs)


_UNKNOWN = Rule(lambda call: [])
"""The rule of operators without one, on ranks outside the mesh."""


def _operands(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], tuple[Place, ...]]:
    """Return all tensors among the arguments, and which arguments they are."""
    found: list[Any] = []
    places: list[Place] = []
    for where, arg in (*enumerate(args), *kwargs.items()):
        if isinstance(arg, torch.Tensor):
            found.append(arg)
            places.append((where, None))
        elif isinstance(arg, (list, tuple)):
            for inside, one in enumerate(arg):
                if isinstance(one, torch.Tensor):
                    found.append(one)
                    places.append((where, inside))
    return found, tuple(places)


def _are_numbers_of_meshes(specs: Sequence[DTensorSpec]) -> bool:
    """Return whether these are results, without gradient, on several meshes, for a plain tensor.

    torch's `clip_grad_norm_` makes one norm of those of gradients so.
    """
    several = any(spec.mesh != specs[0].mesh for spec in specs)
    return several and not torch.is_grad_enabled() and not any(spec.shape for spec in specs)


def _check_meshes(op: Op, specs: Sequence[DTensorSpec]) -> None:
    mesh = specs[0].mesh
    for spec in specs:
        if spec.mesh is not mesh and spec.mesh != mesh:
            raise MeshError(
                f"{op} is given tensors of different meshes",
                op=str(op),
                seen=" and ".join(f"{m!r} of ranks {m.mesh.tolist()}" for m in (mesh, spec.mesh)),
                fix="Equal meshes have the same ranks, shape, names and device. Put both on "
                "one mesh: distribute_tensor(t.full_tensor(), mesh, placements).",
            )


def _check_copies(op: Op, operands: Sequence[Any], places: Sequence[Place]) -> None:
    """Refuse to write views that are copies, and to read them once their source was written."""
    mutated = schema_of(op).mutated
    for tensor, (where, _) in zip(operands, places, strict=True):
        if type(tensor) is _DTensor and tensor.copied_at is not None:
            name = schema_of(op).names[where] if isinstance(where, int) else where
            check_copy(str(op), tensor, name in mutated)


def check_copy(op: str, tensor: DTensor, writes: bool = False) -> None:
    """Refuse to write a view that is a copy, and to read it once its source was written.

    A view of a sharded tensor that had to be moved shares no memory with it, nor does one of a
    part whose strides do not allow it.
    """
    version = tensor.copied_at
    if version is not None and (writes or tensor._version != version):
        raise PlacementError(
            f"{op} meets a view that is a copy",
            op=op,
            seen=f"{tensor.spec}: to take the view, its source had to be moved between ranks, or "
            "its part to be stored in another order",
            fix="Redistribute the source first so that the view needs no communication, or "
            "clone() the view to work on a copy. Parts for from_local() must have the order of "
            "its stride=.",
        )


# ---- every call ----------------------------------------------------------------------------------


def _run(plan: OperatorPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values: list[torch.Tensor] = []
    for place, move in zip(plan.places, plan.moves, strict=True):
        part = argument_at((args, kwargs), place).part
        values.append(part if move is None else redistribute(part, *move))
    filled, named = fill(args, kwargs, plan.places, values)
    is_copy = False
    try:
        result = plan.local(*filled, **named)
    except OtherStrides as other:
        result, is_copy = other.copy, True
    for number in plan.restored:
        move = plan.moves[number]
        assert move is not None
        part = argument_at((args, kwargs), plan.places[number]).part
        restore(part, move[0], values[number], move[1])
    return wrapped_results(plan, result, (args, kwargs), is_copy)
