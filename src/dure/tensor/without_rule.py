"""Operators without a sharding rule: decomposed into others, or computed on full tensors.

If torch has a decomposition, the operator runs as other operators. Otherwise every rank computes it
on full tensors, with one warning that names the operator. Operators that draw random numbers are
refused, since ranks would draw different ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from dure import torch_private
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
"""Operators, each with a mesh, whose decomposition was tried and has operators without a rule.

The number of a mesh differs between ranks that are threads: each of them must try.
"""


class NoRule(Exception):
    """An operator of a decomposition has no rule: compute the decomposed one on full tensors."""


def run_without_rule(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that has no rule: decomposed, or on full tensors.

    All ranks decide the same way: the errors that end the attempt to decompose depend only on the
    operators of the decomposition, on placements and on arguments. Any other error is an error of
    the operator and is raised on the ranks where it occurs. Writes to tensors whose elements share
    memory are not decomposed: decompositions end in `copy_`, which torch refuses for such tensors.
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
    """Return a function that computes an operator by other operators; None if torch has none.

    Composite operators arrive here undecomposed in inference mode, and when a rule calls them.
    """
    has_kernel = torch_private.dispatch_has_kernel
    if has_kernel(op.name(), "CompositeImplicitAutograd"):
        return op.decompose
    return torch_private.decomposition_table.get(op)


def _on_full_tensors(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on full tensors on every rank; move written values back into the parts."""
    op, schema = call.op, schema_of(call.op)
    moved = not all(spec.is_replicated() for spec in call.operands)
    if moved and schema.mutated and _written_by_another(call, args, kwargs):
        return args[0]
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refused(
            call,
            "draws random numbers, which would differ between ranks",
            "Call it on a plain tensor, to_local() or full_tensor()",
        )
    mesh = call.operands[0].mesh
    full = (Replicate(),) * mesh.ndim
    restored = [n for n in written(call) if not call.operands[n].is_replicated()]
    if any(call.operands[n].meta.overlaps for n in restored):
        raise _refused(
            call,
            "would write a sharded tensor whose elements share memory, as those of expand() do",
            "clone() the tensor before writing it",
        )
    if not all(can_be_restored(call.operands[n], full) for n in restored):
        raise _refused(
            call,
            "would write a tensor whose new value cannot be split into terms again",
            "redistribute() it to Replicate() or Shard() first",
        )
    if moved and not argument_at((args, kwargs), call.places[0]).is_meta:  # else nothing is sent
        if state.strict.get():
            raise _refused(
                call,
                "would gather its operands, which strict() forbids",
                "Redistribute its operands to Replicate() first",
            )
        if op not in _warned:
            _warned.add(op)
            warnings.warn(
                f"{op} has no sharding rule: every rank gathers {_listed(call)} and computes on "
                "the full tensors. To avoid that, redistribute the operands first, or register a "
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
    """Run an in-place operator as its out-of-place form; return whether there is one."""
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


def _refused(call: OpCall, why: str, fix: str) -> PlacementError:
    return PlacementError(
        f"{call.name} has no sharding rule, and {why}",
        op=call.name,
        seen=_listed(call),
        fix=f"{fix}, or register a rule with dure.tensor.experimental.register_sharding.",
    )
