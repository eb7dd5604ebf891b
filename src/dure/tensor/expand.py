"""Choose a strategy for each axis of the mesh.

For each mesh axis the strategy with the lowest cost is chosen: the cost of redistributing the
operands on that axis. Among equal costs the strategy that moves the fewest operands wins, then the
first one in the rule. Axes are decided one after another, from the first, given the placements
chosen for earlier axes.

So that results get the placements that torch gives them, costs are torch's (`price_of`), and two of
torch's restrictions apply. If no operand is sharded on any axis, none becomes sharded: Partial
operands become replicated, although a reduce_scatter would cost less. And no operand is exchanged
or scattered into more parts than its dimension has elements, unless another operand is written and
so keeps its placement. A replicated operand may be cut that way, which sends nothing.

An operand that is written keeps its placement: only strategies that keep it, and give the result
the same placement, are considered. If there is none, written operands may be moved and are moved
back (`movable`; planning.py); then the result must have the placement that the operand is moved to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from dure.errors import PlacementError
from dure.tensor.call import AxisStrategy, OpCall, schema_of
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import price_of
from dure.tensor.spec import DTensorSpec, mixes_reductions

__all__ = ["Choice", "choose", "written"]

Choice = tuple[tuple[tuple[Placement, ...], ...], tuple[tuple[Placement, ...], ...]]
"""For each operand its placements, and for each result."""


def choose(call: OpCall, strategies: Sequence[AxisStrategy], movable: bool = False) -> Choice:
    """Choose a strategy for each axis.

    Args:
        call: The call.
        strategies: The valid strategies on one axis, without the fully replicated one.
        movable: Whether operands that are written may be moved.

    Raises:
        PlacementError: An operand that is written would have to be moved.
    """
    operands = [list(spec.placements) for spec in call.operands]
    results: list[list[Placement]] = [[] for _ in call.outputs]
    fixed, held = written(call), _operands(call, _LIKE_IN_FORWARD.get(call.name, ()))
    dtypes = [spec.meta.dtype for spec in call.operands]
    dtypes += [None if meta is None else meta.dtype for meta in call.outputs]
    replicated = AxisStrategy((Replicate(),) * len(operands), (Replicate(),) * len(results))
    options = [*strategies, replicated]
    if not any(p.is_shard() for spec in call.operands for p in spec.placements):
        options = [o for o in options if not any(p.is_shard() for p in o.inputs)]
    for axis in range(len(operands[0])):
        best: tuple[float, int, int] | None = None
        chosen = replicated
        for number, option in enumerate(options):
            if any(option.inputs[n] != call.operands[n].placements[axis] for n in held):
                continue
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
            cost = _cost(call.operands, operands, axis, option, limited=not (fixed or held))
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


_WRITTEN_IN_TRAINING: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._batch_norm_with_update.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    ),
    ("running_mean", "running_var"),
)
"""Arguments that operators write in training, of which results say nothing.

The schema of some does not say so.
"""
_LIKE_IN_FORWARD: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("aten.cudnn_batch_norm_backward.default", "aten.batch_norm_backward.default"),
    ("save_mean", "save_var"),
)
"""Arguments whose placements are those of the forward pass, which saved other memory like them."""


def written(call: OpCall) -> list[int]:
    """Return the numbers of the operands that the operator writes."""
    schema = schema_of(call.op)
    names = _WRITTEN_IN_TRAINING.get(call.name)
    if names is None:
        names = schema.mutated
    elif call.has("training") and not call.arg("training"):
        names = ()
    return _operands(call, names)


def _operands(call: OpCall, names: Collection[str]) -> list[int]:
    """Return the numbers of the operands that are arguments of these names, or in them."""
    all_names = schema_of(call.op).names
    given = [all_names[where] if isinstance(where, int) else where for where, _ in call.places]
    return [n for n, name in enumerate(given) if name in names]


def _keeps(
    call: OpCall, option: AxisStrategy, axis: int, fixed: Sequence[int], movable: bool
) -> bool:
    """Return whether an option keeps the placements of written operands and of their results."""
    if call.name in _WRITTEN_IN_TRAINING:
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
    option: AxisStrategy,
    limited: bool,
) -> float:
    """Return the cost of redistributing the operands to an option's placements on one axis.

    If `limited`, cutting an operand into more parts than `_fits` allows costs inf.
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
    """Return whether a dimension has at least one element for each part that placements make."""
    sizes = zip(spec.mesh.shape, placements, strict=True)
    return spec.shape[dim] >= math.prod(n for n, p in sizes if p.is_shard(dim))


def _unmovable(call: OpCall, axis: int, fixed: Sequence[int]) -> PlacementError:
    names = ", ".join(str(call.operands[number]) for number in fixed)
    return PlacementError(
        f"{call.name} would have to redistribute an operand that it writes",
        op=call.name,
        seen=f"on mesh axis {axis}; it writes {names}; its operands are "
        + ", ".join(map(str, call.operands)),
        fix="Use the operator that returns a new tensor, or redistribute() first.",
    )
