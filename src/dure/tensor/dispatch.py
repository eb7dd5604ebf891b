"""How an operator on DTensors is run: look up, move, compute on the parts, wrap.

The first call of an operator with certain specs asks the rules (*miss*): which placements its
operands must have, and which its results get. The answer is kept as a `Plan` under the operator,
the specs and the other arguments; every later call of that kind (*hit*) costs one dictionary
look-up besides the operator on the parts and the wrapping of its result. A hit is run by the
extension `_hits` (csrc/dispatch/hits.cpp), or, where that is not there, by `dispatch` itself.

What has no rule is decomposed; what has no decomposition is computed by every rank on whole
tensors, with one warning that names the operator. An operator that draws random numbers, writes its
operands is not: that would be silently wrong. Views that had to be moved are copies: they cannot be
written, nor read once their source was written. A view that the strides of a part do not allow,
although those of the full tensor do, is a copy as well, unless a DTensor alone has the part: then
the part is stored anew.

What an operator writes stays where it is, or a typed error is raised. But torch's own formulas, of
composite operators and of gradients, write tensors that no program has ever seen: these are moved
first (`_moves_unseen`); and they make plain ones, which are taken as replicated.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dure.comm.untraced import untraced_below
from dure.comm.world import when_left
from dure.errors import CommError, MeshError, PerformanceWarning, PlacementError, UsageError
from dure.tensor import state
from dure.tensor.call import (
    Op,
    OpCall,
    Place,
    Strategy,
    check_out,
    direct,
    fill,
    outs_of,
    schema_of,
)
from dure.tensor.expand import choose, written
from dure.tensor.holders import has_its_part_alone, is_shared, unseen_among
from dure.tensor.placement_types import Replicate
from dure.tensor.redistribute import redistribute
from dure.tensor.registry import OtherStrides, Rule, by_value, copying_overlaps, rule_of
from dure.tensor.results import forget_results, leaves, results_of
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

if TYPE_CHECKING:
    from dure.tensor.dtensor import DTensor

__all__ = [
    "Plan",
    "bind",
    "check_copy",
    "decomposition_of",
    "dispatch",
    "forget_plans",
    "has_own_way",
    "plans",
    "special",
    "unsharded",
]

_MOST_PLANS = 1 << 16
plans: dict[Any, Plan] = {}
when_left.append(plans.clear)
_special: dict[Op | torch.Tag, Callable[..., Any]] = {}
"""Operators, or all with a tag, that run in a way of their own: called with (op, args, kwargs)."""
_lists: set[Op | torch.Tag] = set()
"""Those on lists, which may have plain tensors too; nothing is looked up first."""
_warned: set[Op] = set()
_undecomposed: set[tuple[Op, int]] = set()
"""Operators whose decomposition was tried, on a mesh, and needs what has no rule.

With the mesh, whose number is a rank's own: ranks that are threads must each try.
"""
_DTensor: type[DTensor]
_wrap: Callable[[torch.Tensor, DTensorSpec], DTensor]


def bind(cls: type[DTensor], wrap: Callable[[torch.Tensor, DTensorSpec], DTensor]) -> None:
    """Hand over the class, which is defined above this file."""
    global _DTensor, _wrap
    _DTensor, _wrap = cls, wrap


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
    """Tell whether an operator is run neither by a rule nor by what is done without one."""
    return op in _special


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done for one kind of call.

    Attributes:
        places: Where each operand stands among the arguments.
        moves: For each operand its spec and the one that it must have, None if it has it.
        local: Runs in the operator's place, on the parts.
        outputs: The spec of each result, None for what is no tensor.
        output: The spec of the only result, or those of several, if nothing is moved or written,
            every operand is an argument by itself, and the rank is in the mesh.
        written: Of an operator that writes, with one result: the number of the argument that it
            returns.
        returns: For each result where the argument stands that it is; None for new ones.
        is_view: Whether results ought to share memory with the first operand.
    """

    places: tuple[Place, ...]
    moves: tuple[tuple[DTensorSpec, DTensorSpec] | None, ...]
    local: Callable[..., Any]
    outputs: tuple[DTensorSpec | None, ...]
    output: DTensorSpec | tuple[DTensorSpec | None, ...] | None
    written: int | None
    returns: tuple[Place | None, ...]
    is_view: bool


@untraced_below
def dispatch(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    unseen: frozenset[Place] | None = None,
) -> Any:
    """Run an operator, some of whose arguments are DTensors.

    Args:
        op: The operator.
        args, kwargs: Its arguments.
        unseen: Those among them that no program has, if that is known already.
    """
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
    if (
        plan is None
    ):  # not in the handler: an error of the operator has nothing to do with the table
        arg = None  # so that _miss sees who else has it
        return _miss(op, args, kwargs or {}, key, unseen)
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
        result = OtherStrides  # after the handler: the exception's frames have the part, too
    if result is OtherStrides:
        del values
        return _run(plan, args, kwargs or {})
    if output is None:
        assert returned is not None
        return args[returned]
    if isinstance(output, tuple):
        pairs = zip(result, output, strict=True)
        return tuple([r if s is None or r is None else _wrap(r, s) for r, s in pairs])
    return _wrap(result, output)


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
    unseen: frozenset[Place] | None,
) -> Any:
    if unseen is None:
        unseen = unseen_among(args)
    operands, places = _operands(args, kwargs)
    plain = [t for t in operands if type(t) is not _DTensor]
    if plain:
        if _writes_plain(op, operands, places):
            return op(*_numbers(args), **dict(zip(kwargs, _numbers(kwargs.values()), strict=True)))
        args, kwargs = _without_plain(op, args, kwargs, operands, places, unseen)
        return dispatch(op, args, kwargs, unseen)
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
    if found is None or _depends_on_values(call):
        if specs[0].coordinate is not None:
            return _without_rule(call, args, kwargs, unseen)
        returned = schema_of(op).returned
        if written(call) and all(returned):  # nothing is to be written here
            places = [_place_of(call, name) for name in returned]
            if None not in places:
                own = tuple(_at((args, kwargs), place) for place in places if place is not None)
                return own[0] if len(own) == 1 else own or None
        found = _UNKNOWN
    call.outputs = results_of(call, key)
    try:
        plan = _plan(call, found)
    except PlacementError:
        if not _moves_unseen(call, args, found.options(call), unseen):
            raise
        return dispatch(op, args, kwargs)
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    if not _depends_on_default_dtype(call):
        with suppress(TypeError):
            plans[tuple(key)] = plan
    return _run(plan, args, kwargs)


_UNKNOWN = Rule(lambda call: [])
"""The rule of operators without one, on ranks outside the mesh."""


def _depends_on_values(call: OpCall) -> bool:
    """Tell whether the shape of a result depends on values, such as of what a mask selects."""
    masked = any(spec.meta.dtype in (torch.bool, torch.uint8) for spec in call.operands[1:])
    return torch.Tag.dynamic_output_shape in call.op.tags and (
        masked or call.op is not torch.ops.aten.index.Tensor
    )


def _depends_on_default_dtype(call: OpCall) -> bool:
    """Tell whether results are of the default dtype, which a program may change."""
    named = call.has("dtype") and call.arg("dtype") is not None
    return (
        not named
        and any(meta is not None and _is_inexact(meta.dtype) for meta in call.outputs)
        and not any(_is_inexact(spec.meta.dtype) for spec in call.operands)
    )


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _operands(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], tuple[Place, ...]]:
    """Return all tensors among the arguments, and where they stand."""
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


def _writes_plain(op: Op, operands: Sequence[Any], places: Sequence[Place]) -> bool:
    """Tell whether a plain tensor is written, with DTensors that are one number each.

    As in clipping, which scales gradients of both kinds by one factor.
    """
    schema = schema_of(op)
    return any(
        type(t) is not _DTensor
        and (schema.names[where] if isinstance(where, int) else where) in schema.mutated
        for t, (where, _) in zip(operands, places, strict=True)
    ) and all(t.ndim == 0 for t in operands if type(t) is _DTensor)


def _numbers(values: Any) -> list[Any]:
    """Return arguments with DTensors as whole plain tensors."""
    return [v.full_tensor() if type(v) is _DTensor else v for v in values]


def _without_plain(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    places: Sequence[Place],
    unseen: frozenset[Place],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take plain tensors as replicated where that is meant; raise where it may not be.

    It is meant of tensors of one element, and of what torch's C++ code made for itself: in formulas
    of gradients, which can have it from nothing else than DTensors and constants; elsewhere only of
    integers, such as the index of ``x[[0, 2]]``, of masks, as attention makes, and of tensors
    without values, by which torch finds the shape of a gradient of zeros.
    """
    specs = [t.spec for t in operands if type(t) is _DTensor]
    implicit = state.implicit_replication.get()
    replaced: list[Any] = []
    backward = _is_called_by_autograd()
    mutated = schema_of(op).mutated
    for tensor, (where, inside) in zip(operands, places, strict=True):
        if type(tensor) is _DTensor:
            replaced.append(tensor)
            continue
        name = schema_of(op).names[where] if isinstance(where, int) else where
        exact = not (tensor.is_floating_point() or tensor.is_complex())
        small = exact or tensor.is_meta or _is_mask(tensor)
        own = small and (where, inside) in unseen and not is_shared(tensor)
        unread = tensor.is_meta or op is _SAME_SIZE
        constant = (backward or own or unread) and name not in mutated
        constant = constant and (op is _SAME_SIZE or not tensor.requires_grad)
        if tensor.numel() == 1 or implicit or constant:
            mesh = specs[0].mesh
            whole = (Replicate(),) * mesh.ndim
            part = tensor
            if tensor._is_zerotensor():  # of a formula of torch's; it has no memory
                part = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            replaced.append(_wrap(part, spec_of(mesh, whole, TensorMeta.of(part))))
        else:
            is_unsharded = tensor in unsharded
            raise UsageError(
                f"{op} is given a plain tensor beside DTensors",
                op=str(op),
                seen=f"argument {name!r}, {tensor.dtype} {list(tensor.shape)}, beside "
                + ", ".join(map(str, specs)),
                fix=_FIX_UNSHARDED if is_unsharded else _FIX_PLAIN,
            )
    filled, named = fill(args, kwargs, places, replaced)
    return tuple(filled), named


unsharded = WeakTensorKeyDictionary()
"""What sharded modules compute with for a time, and a `WeakMethod` that tells the shard."""

_SAME_SIZE = torch.ops.aten.is_same_size.default
"""Reads no values, so a plain tensor beside DTensors is no mistake."""
_FIX_PLAIN = (
    "Make it a DTensor: distribute_tensor(t, mesh, placements) if all ranks have the whole, "
    "DTensor.from_local if each has its part. Within "
    "dure.tensor.experimental.implicit_replication() it is taken as replicated."
)
_FIX_UNSHARDED = (
    "It is the unsharded parameter of a fully_shard module: a forward with gradients that no "
    "backward has followed left it so. Call reshard() of the module first, or run that forward "
    "under torch.no_grad()."
)


def _is_called_by_autograd() -> bool:
    """Tell whether a formula of autograd's calls the operator, and no function in Python."""
    if torch._C._current_graph_task_id() == -1:  # pyright: ignore
        return False
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE


_OWN_FILES = {
    __file__.replace("dispatch.py", name) for name in ("dispatch.py", "dtensor.py", "watching.py")
}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # pyright: ignore


def _is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is 0 or minus infinity everywhere."""
    return bool(((tensor == 0) | (tensor == -math.inf)).all())


def _are_numbers_of_meshes(specs: Sequence[DTensorSpec]) -> bool:
    """Tell whether these are results, without gradient, on several meshes, for a plain tensor.

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


def _moves_unseen(
    call: OpCall,
    args: tuple[Any, ...],
    strategies: Sequence[Strategy],
    unseen: frozenset[Place],
) -> bool:
    """Move what an operator writes, if only torch's C++ code has it; tell whether it was moved.

    A tensor that a program holds, or whose part it holds, or that shares its memory with another
    one, is not moved: the program would find it with other placements, or the other would not be
    written. Moving keeps the value, so who else reads the tensor, such as autograd, reads the same.
    """
    numbers = written(call)
    for number in numbers:
        where, inside = call.places[number]
        if (
            inside is not None
            or (where, None) not in unseen
            or not has_its_part_alone(_at((args, {}), (where, None)))
        ):
            return False
    placements, _ = choose(call, strategies, movable=True)
    for number in numbers:
        tensor = _at((args, {}), call.places[number])
        target = tensor.spec.with_placements(placements[number])
        tensor.part, tensor.spec = redistribute(tensor.part, tensor.spec, target), target
    return bool(numbers)


def _plan(call: OpCall, found: Rule) -> Plan:
    if found.all_axes:
        (only,) = found.strategies(call)
        wanted, given = only.inputs, only.outputs
    else:
        wanted, given = choose(call, found.options(call))
    targets = [
        spec.with_placements(placements)
        for spec, placements in zip(call.operands, wanted, strict=True)
    ]
    mesh = call.operands[0].mesh
    outputs = tuple(
        None if meta is None else spec_of(mesh, placements, meta)
        for meta, placements in zip(call.outputs, given, strict=True)
    )
    settled = replace(call, operands=tuple(targets), results=outputs)
    inside = mesh.get_coordinate() is not None
    local = (found.local or copying_overlaps)(settled) if inside else None
    moves = tuple(
        None if spec.placements == target.placements else (spec, target)
        for spec, target in zip(call.operands, targets, strict=True)
    )
    schema = schema_of(call.op)
    alone = (
        not any(moves) and inside and all(i is None and isinstance(w, int) for w, i in call.places)
    )
    alone = alone and all(kind == "Tensor" for kind in schema.kinds)
    returned = tuple(_place_of(call, name) for name in schema.returned)
    written = returned[0][0] if alone and len(returned) == 1 and returned[0] is not None else None
    output = None if schema.mutated or not alone else outputs
    if output is not None and len(output) < 2:
        output = next(iter(output), None)
    return Plan(
        places=call.places,
        moves=moves,
        local=_untraced(local or direct(call.op)) if inside else _nothing(schema.kinds, outputs),
        outputs=outputs,
        output=output,
        written=written if isinstance(written, int) else None,
        returns=returned,
        is_view=schema.is_view,
    )


def _untraced(local: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function, which is not always called by one that it skips."""
    return untraced_below(local) if isinstance(local, FunctionType) else local


def _place_of(call: OpCall, name: str | None) -> Place | None:
    number = None if name is None else call.operand(name)
    return None if number is None else call.places[number]


def _nothing(kinds: Sequence[str], outputs: Sequence[DTensorSpec | None]) -> Callable[..., Any]:
    """Return what a rank outside the mesh runs: it has no elements, and sends nothing."""
    is_list = len(kinds) == 1 and kinds[0].startswith("List")

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers = {n for n, kind in enumerate(kinds) if kind == "int" and not is_list}
        found = [
            (0 if n in numbers else None) if spec is None else spec.part_outside()
            for n, spec in enumerate(outputs)
        ]
        return found if is_list else found[0] if len(found) == 1 else tuple(found)

    return run


# ---- every call ----------------------------------------------------------------------------------


def _run(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values: list[torch.Tensor] = []
    for (where, inside), move in zip(plan.places, plan.moves, strict=True):
        holder = args[where] if isinstance(where, int) else kwargs[where]
        tensor = holder if inside is None else holder[inside]
        values.append(tensor.part if move is None else redistribute(tensor.part, *move))
    filled, named = fill(args, kwargs, plan.places, values)
    try:
        result = plan.local(*filled, **named)
    except OtherStrides as other:
        result, source = other.copy, other.source
    else:
        return _wrapped(plan, result, (args, kwargs))
    del values, filled  # they have the part, too
    holder = _at((args, kwargs), plan.places[0])
    if plan.is_view and not any(plan.moves) and has_its_part_alone(holder):
        holder.part = source  # nothing else has the memory: the part itself gets other strides
        return _wrapped(plan, result, (args, kwargs))
    return _wrapped(plan, result, (args, kwargs), is_copy=True)


def _wrapped(plan: Plan, result: Any, sources: tuple[Any, Any], is_copy: bool = False) -> Any:
    """Return the results as DTensors; what the operator wrote, as the arguments that they are.

    Args:
        plan: What is done for this kind of call.
        result: What the operator returned for the parts.
        sources: The arguments.
        is_copy: Whether a copy was made in the place of a view.
    """
    if len(plan.returns) == 1 and plan.returns[0] is not None:
        return _at(sources, plan.returns[0])
    version = None
    if plan.is_view:
        source = _at(sources, plan.places[0])
        if is_copy or any(plan.moves) or source.copied_at is not None:
            version = source._version
    return _wrap_each(result, iter(plan.outputs), iter(plan.returns), sources, version)


def _wrap_each(
    one: Any,
    specs: Iterator[DTensorSpec | None],
    returns: Iterator[Place | None],
    sources: tuple[Any, Any],
    version: int | None,
) -> Any:
    """Return a result, or each in a list; not a closure, whose cycle would keep all tensors."""
    if isinstance(one, (list, tuple)):
        made = [_wrap_each(inner, specs, returns, sources, version) for inner in one]
        return tuple(made) if type(one) is tuple else made
    spec, place = next(specs), next(returns, None)
    if spec is None or not isinstance(one, torch.Tensor):
        return one
    if place is not None:
        return _at(sources, place)
    made = _wrap(one, spec)
    made.copied_at = version
    return made


def _at(sources: tuple[Any, Any], place: Place) -> Any:
    where, inside = place
    holder = sources[0][where] if isinstance(where, int) else sources[1][where]
    return holder if inside is None else holder[inside]


# ---- operators without a rule --------------------------------------------------------------------


class _NoWay(Exception):
    """Within a decomposition an operator has no rule: the decomposed one is replicated instead."""


def _without_rule(
    call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], unseen: frozenset[Place]
) -> Any:
    op = call.op
    inside = state.decomposing.get()
    tried = op, call.operands[0].mesh.number
    decomposed = None if tried in _undecomposed else decomposition_of(op)
    if decomposed is not None:
        try:
            with state.replicating(), state.within_decomposition():
                result = decomposed(*args, **kwargs)
        except CommError:
            raise
        except Exception:
            result = NotImplemented
        if result is not NotImplemented:
            return result
        _undecomposed.add(tried)
    if inside:
        raise _NoWay(str(op))
    return _replicated(call, args, kwargs, unseen)


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    """Return a function that computes an operator by others; None if torch has none.

    Operators that torch itself runs as others arrive here undivided in inference mode, and when
    they are called from inside a rule.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore
    if has_kernel(op.name(), "CompositeImplicitAutograd"):
        return op.decompose
    table = torch._decomp.decomposition_table  # pyright: ignore
    return table.get(op)


def _replicated(
    call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], unseen: frozenset[Place]
) -> Any:
    """Let every rank compute on whole tensors, where nothing else is known."""
    op, schema = call.op, schema_of(call.op)
    moved = not all(spec.is_replicated() for spec in call.operands)
    if moved and schema.mutated:
        if _written_by_another(call, args, kwargs):
            return args[0]
        if _moves_unseen(call, args, [], unseen):
            return dispatch(op, args, kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refused(call, "draws random numbers, and no rule says which")
    stuck = not all(call.operands[number].is_replicated() for number in written(call))
    if stuck:
        raise _refused(call, "writes its operand")
    if moved and not _at((args, kwargs), call.places[0]).is_meta:  # else nothing is sent
        if state.strict.get():
            raise _refused(call, "would be computed replicated, which strict() forbids")
        if op not in _warned:
            _warned.add(op)
            warnings.warn(
                f"{op} has no sharding rule: every rank gathers {_listed(call)} and computes on "
                "the full tensors. To avoid that, redistribute the operands before, or register a "
                "rule with dure.tensor.experimental.register_sharding. This warning is shown once "
                "per operator.",
                PerformanceWarning,
                stacklevel=4,
            )
    mesh = call.operands[0].mesh
    whole = (Replicate(),) * mesh.ndim
    values = [
        redistribute(_at((args, kwargs), place).part, spec, spec.with_placements(whole))
        for place, spec in zip(call.places, call.operands, strict=True)
    ]
    given, outs = list(values), outs_of(call)
    for number in outs:
        values[number] = values[number].new_empty(0)
    filled, named = fill(args, kwargs, call.places, values)
    result = op(*filled, **named)
    for number in outs:
        check_out(call, number, values[number].shape)
    for number in outs:
        given[number].copy_(values[number])
    outputs = [
        None if t is None else spec_of(mesh, whole, TensorMeta.of(t)) for t in leaves(result)
    ]
    returns = tuple(_place_of(call, name) for name in schema.returned)
    moves = tuple(None if s.is_replicated() else (s, s) for s in call.operands)
    plan = Plan(call.places, moves, op, tuple(outputs), None, None, returns, schema.is_view)
    return _wrapped(plan, result, (args, kwargs))


def _written_by_another(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compute by the operator that returns a new tensor, and write that; tell whether it was."""
    packet, overload = str(call.op).removeprefix("aten.").split(".")
    other = getattr(torch.ops.aten, packet.removesuffix("_"), None)
    target: Any = args[0]
    if (
        not packet.endswith("_")
        or written(call) != [0]
        or type(target) is not _DTensor
        or target.spec.partial
        or target.spec.meta.overlaps
        or other is None
        or overload not in other.overloads()
    ):
        return False
    result = dispatch(getattr(other, overload), args, kwargs)
    to = result.spec.with_placements(target.spec.placements)
    target.part.copy_(redistribute(result.part, result.spec, to))
    return True


def _listed(call: OpCall) -> str:
    return ", ".join(map(str, call.operands))


def _refused(call: OpCall, why: str) -> PlacementError:
    return PlacementError(
        f"{call.name} has no sharding rule, and {why}",
        op=call.name,
        seen=_listed(call),
        fix="Redistribute its operands to Replicate() first, or register a rule with "
        "dure.tensor.experimental.register_sharding.",
    )
