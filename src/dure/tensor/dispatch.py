"""How an operator on DTensors is run: look up, redistribute, compute on the parts, wrap.

The first call of an operator with certain specs (*miss*) evaluates its sharding rule: which
placements its operands must have, and which its results get. The answer is cached as an
`OperatorPlan` (planning.py) under the operator, the specs and the other arguments. Every later call
of that kind (*hit*) costs one dictionary look-up, the operator on the parts, and the wrapping of
its result. `dispatch` here defines a hit; the extension `_hits` (csrc/dispatch/hits.cpp) does the
same faster.

An operator without a rule is decomposed, or computed on full tensors (without_rule.py). Plain
tensors among DTensors are refused or taken as replicated (plain_tensors.py).

A view is a copy if its source has to be redistributed, or if the strides of a part do not allow the
view although those of the full tensor do. Writing such a copy, or reading it after its source was
written, raises `PlacementError`.
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
    "is_special",
    "plans",
    "special",
]

_MOST_PLANS = 1 << 16
plans: dict[Any, OperatorPlan] = {}
when_left.append(plans.clear)
_special: dict[Op | torch.Tag, Callable[..., Any]] = {}
"""Custom implementations, by operator or tag; called with (op, args, kwargs)."""
_lists: set[Op | torch.Tag] = set()
"""Operators on lists, which may contain plain tensors; their plans are not looked up."""
_DTensor: type[DTensor]


def bind(cls: type[DTensor]) -> None:
    """Set the class `DTensor`, which is defined in a file that imports this one."""
    global _DTensor
    _DTensor = cls


def special(*ops: Op | torch.Tag, lists: bool = False) -> Callable[..., Any]:
    """Register the decorated function as the implementation of these operators.

    Args:
        ops: Operators, or tags of operators.
        lists: Whether they take lists of tensors.
    """

    def register(run: Callable[..., Any]) -> Any:
        _special.update(dict.fromkeys(ops, run))
        _lists.update(ops if lists else ())
        return run

    return register


def forget_plans() -> None:
    """Empty the caches of plans and results, after a rule has changed."""
    plans.clear()
    forget_results()


def is_special(op: Op) -> bool:
    """Return whether an operator has a custom implementation instead of a rule."""
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
    """Return an argument's entry in the key of a plan.

    A float is represented by its type, unless the operator's rule depends on its value
    (`by_value`). Plain tensors and views that are copies get a list, which has no hash: such calls
    never hit.
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
        numbers = [redistribute(t.part, t.spec, t.spec.replicated()) for t in operands]
        return op(numbers, *args[1:], **kwargs)
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
        if written(call) and all(returned):  # this rank has no part to write
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
    """Return whether these are numbers on several meshes, outside of autograd.

    torch's `clip_grad_norm_` stacks the norms of gradients like this; the result is a plain tensor.
    """
    several = any(spec.mesh != specs[0].mesh for spec in specs)
    return several and not torch.is_grad_enabled() and not any(spec.shape for spec in specs)


def _check_meshes(op: Op, specs: Sequence[DTensorSpec]) -> None:
    mesh = specs[0].mesh
    for spec in specs:
        if spec.mesh is not mesh and spec.mesh != mesh:
            raise MeshError(
                f"{op} got tensors of different meshes",
                op=str(op),
                seen=" and ".join(f"{m!r} of ranks {m.mesh.tolist()}" for m in (mesh, spec.mesh)),
                fix="Put both on one mesh: distribute_tensor(t.full_tensor(), mesh, placements). "
                "Meshes are equal if they have the same ranks, shape, names and device.",
            )


def _check_copies(op: Op, operands: Sequence[Any], places: Sequence[Place]) -> None:
    """Raise if an operand is a view that is a copy, and is written or stale."""
    mutated = schema_of(op).mutated
    for tensor, (where, _) in zip(operands, places, strict=True):
        if type(tensor) is _DTensor and tensor.copied_at is not None:
            name = schema_of(op).names[where] if isinstance(where, int) else where
            check_copy(str(op), tensor, name in mutated)


def check_copy(op: str, tensor: DTensor, writes: bool = False) -> None:
    """Raise if a view that is a copy is written, or read after its source was written."""
    version = tensor.copied_at
    if version is not None and (writes or tensor._version != version):
        raise PlacementError(
            f"{op} cannot write this view, because it is a copy of its source"
            if writes
            else f"{op} would read a view that is an outdated copy: its source was written since",
            op=op,
            seen=f"{tensor.spec}: the view could not share memory with its source, which had to be "
            "redistributed, or whose part is stored in another order",
            fix="Redistribute the source before taking the view, so that the view needs no "
            "communication, or clone() the view to work on a copy. Parts passed to from_local() "
            "must be stored in the order of its stride=.",
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
