"""From what is legal on one axis to what is done on all of them.

For each mesh axis the strategy is chosen that costs least: the redistribution of the operands on
that axis. Among equals the one wins that leaves the most operands as they are, then the one that
comes first in the rule. Axes are chosen one after another, from the first; what has been chosen for
earlier ones is what later ones see.

So that results have the placements that torch gives them, costs are torch's (`price_of`), and two
of torch's restrictions apply. Nothing is sharded where no operand is, on any axis: terms alone
become replicated, though to scatter them would cost less. And no operand is exchanged or scattered
into more parts than its dimension has elements, except beside one that is written and so keeps its
placement; a replicated one may be cut so, which sends nothing.

An operator that writes one of its operands keeps its placement: only strategies that do, and give
the result the same, are considered. If there is none, written operands may be moved, and are moved
back (`movable`; planning.py): then the result must have the placement that the operand is moved to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dure.errors import PlacementError
from dure.tensor.call import OpCall, Strategy, schema_of
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import price_of
from dure.tensor.spec import DTensorSpec, mixes_reductions

__all__ = ["Choice", "choose", "written"]

Choice = tuple[tuple[tuple[Placement, ...], ...], tuple[tuple[Placement, ...], ...]]
"""For each operand its placements, and for each result."""


def choose(call: OpCall, strategies: Sequence[Strategy], movable: bool = False) -> Choice:
    """Choose a strategy for each axis.

    Args:
        call: The call.
        strategies: What is legal on one axis, besides that all is replicated.
        movable: Whether operands that are written may be moved.

    Raises:
        PlacementError: An operand that is written would have to be moved.
    """
    operands = [list(spec.placements) for spec in call.operands]
    results: list[list[Placement]] = [[] for _ in call.outputs]
    fixed = written(call)
    dtypes = [spec.meta.dtype for spec in call.operands]
    dtypes += [None if meta is None else meta.dtype for meta in call.outputs]
    whole = Strategy((Replicate(),) * len(operands), (Replicate(),) * len(results))
    options = [*strategies, whole]
    if not any(p.is_shard() for spec in call.operands for p in spec.placements):
        options = [o for o in options if not any(p.is_shard() for p in o.inputs)]
    for axis in range(len(operands[0])):
        best: tuple[float, int, int] | None = None
        chosen = whole
        for number, option in enumerate(options):
            if not _keeps(call, option, axis, fixed, movable):
                continue
            after = [_with(here, axis, p) for here, p in zip(operands, option.inputs, strict=True)]
            made = [[*here, p] for here, p in zip(results, option.outputs, strict=True)]
            if any(map(mixes_reductions, (*after, *made), dtypes)):
                continue
            moved = sum(
                call.operands[i].placements[axis] != wanted
                for i, wanted in enumerate(option.inputs)
            )
            cost = _cost(call.operands, operands, axis, option, limited=not fixed)
            price = (cost, moved, number)
            if price[0] < math.inf and (best is None or price < best):
                best, chosen = price, option
        if best is None:
            raise _unmovable(call, axis, fixed)
        for i, wanted in enumerate(chosen.inputs):
            operands[i][axis] = wanted
        for i, given in enumerate(chosen.outputs):
            results[i].append(given)
    return tuple(map(tuple, operands)), tuple(map(tuple, results))


_WRITTEN_UNSAID = {"aten.native_batch_norm.default": ("running_mean", "running_var")}
"""What operators write though their schema does not say so."""


def written(call: OpCall) -> list[int]:
    """Return the numbers of the operands that the operator writes."""
    schema = schema_of(call.op)
    unsaid = _WRITTEN_UNSAID.get(call.name, ())
    if unsaid and not call.arg("training"):
        unsaid = ()
    names = [schema.names[where] if isinstance(where, int) else where for where, _ in call.places]
    return [n for n, name in enumerate(names) if name in schema.mutated or name in unsaid]


def _keeps(call: OpCall, option: Strategy, axis: int, fixed: Sequence[int], movable: bool) -> bool:
    """Tell whether an option leaves what is written where it is, results alike."""
    if call.name in _WRITTEN_UNSAID:
        return all(option.inputs[n] == call.operands[n].placements[axis] for n in fixed)
    for place, number in enumerate(fixed):
        here = call.operands[number].placements[axis]
        if movable:
            here = option.inputs[number]
        elif option.inputs[number] != here:
            return False
        if place < len(option.outputs) and option.outputs[place] != here:
            return False
    return True


def _with(placements: Sequence[Placement], axis: int, one: Placement) -> list[Placement]:
    """Return placements with another one on an axis."""
    return [*placements[:axis], one, *placements[axis + 1 :]]


def _cost(
    specs: Sequence[DTensorSpec],
    chosen: Sequence[Sequence[Placement]],
    axis: int,
    option: Strategy,
    limited: bool,
) -> float:
    """Return what it costs to bring the operands to an option's placements on one axis.

    If `limited`, operands that would have to be cut into more parts than `_fits` allows cost inf.
    """
    total = 0.0
    for spec, placements, wanted in zip(specs, chosen, option.inputs, strict=True):
        if placements[axis] == wanted:
            continue
        target = _with(placements, axis, wanted)
        if wanted.is_shard() and wanted.dim >= spec.ndim:
            return math.inf
        sliced = placements[axis].is_replicate()
        free = sliced or not limited
        if wanted.is_shard() and not (free or _fits(spec, target, wanted.dim)):
            return math.inf
        total += price_of(spec.with_placements(placements), spec.with_placements(target))
    return total


def _fits(spec: DTensorSpec, placements: Sequence[Placement], dim: int) -> bool:
    """Tell whether a dimension has an element for each part that placements make of it."""
    sizes = zip(spec.mesh.shape, placements, strict=True)
    return spec.shape[dim] >= math.prod(n for n, p in sizes if p.is_shard(dim))


def _unmovable(call: OpCall, axis: int, fixed: Sequence[int]) -> PlacementError:
    names = ", ".join(str(call.operands[number]) for number in fixed)
    return PlacementError(
        f"{call.name} would have to move what it writes",
        op=call.name,
        seen=f"on mesh axis {axis}; it writes {names}, and is given "
        + ", ".join(map(str, call.operands)),
        fix="Use the operator that returns a new tensor, or redistribute() first.",
    )
