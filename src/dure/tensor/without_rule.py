"""Operators without a sharding rule: decomposed into others, or computed on full tensors.

What torch can decompose runs as other operators. All else is computed by every rank on full
tensors, with one warning that names the operator; an operator that draws random numbers is refused,
since ranks would draw different ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from dure.errors import PerformanceWarning, PlacementError
from dure.tensor import state
from dure.tensor.call import Op, OpCall, argument_at, check_out, fill, outs_of, schema_of
from dure.tensor.expand import written
from dure.tensor.placement_types import Replicate
from dure.tensor.planning import OperatorPlan, can_be_restored, place_of, restore
from dure.tensor.redistribute import redistribute
from dure.tensor.results import leaves, wrapped_results
from dure.tensor.spec import TensorMeta, spec_of
from dure.tensor.wrapping import dtensor_type

__all__ = ["run_without_rule"]

_warned: set[Op] = set()
_undecomposed: set[tuple[Op, int]] = set()
"""Operators whose decomposition was tried, on a mesh, and needs what has no rule.

With the mesh, whose number is a rank's own: ranks that are threads must each try.
"""


class NoRule(Exception):
    """Within a decomposition an operator has no rule: the decomposed one is replicated instead."""


def run_without_rule(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that has no rule: by others, or on full tensors.

    Whether it is decomposed is decided by what all ranks know. The errors that decide against it
    depend on the operators within, on placements and on arguments; any other error is the
    operator's own, and is raised on the ranks that have it. Writes to tensors whose elements
    share memory are not decomposed: decompositions end in `copy_`, and torch refuses that.
    """
    op = call.op
    inside = state.decomposing.get()
    tried = op, call.operands[0].mesh.number
    overlaps = any(call.operands[n].meta.overlaps for n in written(call))
    decomposed = None if overlaps or tried in _undecomposed else _decomposition_of(op)
    if decomposed is not None:
        try:
            with state.replicating(), state.within_decomposition():
                result = decomposed(*args, **kwargs)
        except (NoRule, PlacementError, NotImplementedError):
            result = NotImplemented
        if result is not NotImplemented:
            return result
        _undecomposed.add(tried)
    if inside:
        raise NoRule(str(op))
    return _on_full_tensors(call, args, kwargs)


def _decomposition_of(op: Op) -> Callable[..., Any] | None:
    """Return a function that computes an operator by others; None if torch has none.

    Operators that torch itself runs as others arrive here undivided in inference mode, and when
    they are called from inside a rule.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore
    if has_kernel(op.name(), "CompositeImplicitAutograd"):
        return op.decompose
    table = torch._decomp.decomposition_table  # pyright: ignore
    return table.get(op)


def _on_full_tensors(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on full tensors on every rank; values that were written are moved back."""
    op, schema = call.op, schema_of(call.op)
    moved = not all(spec.is_replicated() for spec in call.operands)
    if moved and schema.mutated and _written_by_another(call, args, kwargs):
        return args[0]
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refused(call, "draws random numbers, and no rule says which")
    mesh = call.operands[0].mesh
    full = (Replicate(),) * mesh.ndim
    restored = [n for n in written(call) if not call.operands[n].is_replicated()]
    if not all(can_be_restored(call.operands[n], full) for n in restored):
        raise _refused(call, "writes its operand")
    if moved and not argument_at((args, kwargs), call.places[0]).is_meta:  # else nothing is sent
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
                stacklevel=5,
            )
    values = [
        redistribute(argument_at((args, kwargs), place).part, spec, spec.with_placements(full))
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
    for number in restored:
        spec = call.operands[number]
        part = argument_at((args, kwargs), call.places[number]).part
        restore(part, spec, given[number], spec.with_placements(full))
    outputs = [None if t is None else spec_of(mesh, full, TensorMeta.of(t)) for t in leaves(result)]
    returns = tuple(place_of(call, name) for name in schema.returned)
    moves = tuple(None if s.is_replicated() else (s, s) for s in call.operands)
    plan = OperatorPlan(
        call.places, moves, (), op, tuple(outputs), None, None, returns, schema.is_view
    )
    return wrapped_results(plan, result, (args, kwargs))


def _written_by_another(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Write what the operator that returns a new tensor computes; return whether there is one."""
    packet, overload = str(call.op).removeprefix("aten.").split(".")
    other = getattr(torch.ops.aten, packet.removesuffix("_"), None)
    target: Any = args[0]
    if (
        not packet.endswith("_")
        or written(call) != [0]
        or type(target) is not dtensor_type()
        or target.spec.partial
        or target.spec.meta.overlaps
        or other is None
        or overload not in other.overloads()
    ):
        return False
    result = getattr(other, overload)(*args, **kwargs)
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
