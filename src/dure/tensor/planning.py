"""The plan of an operator call: derived from the operator's rule, and cached (dispatch.py).

An operator that writes an operand keeps the operand's placements. If no strategy of its rule does,
the operand is redistributed, written, and the new values are redistributed back into the memory of
its part. So the tensor, its views, and parts that the program holds see the write, as with a plain
tensor. If the operand is `Partial`, each rank writes back its term of the new value; that is not
possible for products and for averages of integers: then the operator raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from dure.comm.untraced import untraced_below
from dure.errors import PlacementError
from dure.tensor.call import OpCall, Place, direct, schema_of
from dure.tensor.expand import choose, written
from dure.tensor.placement_types import Placement
from dure.tensor.redistribute import can_be_split, redistribute
from dure.tensor.registry import Rule, copying_overlaps
from dure.tensor.spec import DTensorSpec, spec_of

__all__ = [
    "OperatorPlan",
    "can_be_restored",
    "depends_on_default_dtype",
    "depends_on_values",
    "make_plan",
    "place_of",
    "restore",
]


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """How calls with one key are run.

    Attributes:
        places: The position of each operand among the arguments.
        moves: For each operand its spec and the required spec; None if they are equal.
        restored: Numbers of the operands that are written after a redistribution; their values are
            moved back.
        local: Called on the parts instead of the operator.
        outputs: The spec of each result; None for results that are not tensors.
        output: For the fast path: the spec of the result, or those of several. None if an operand
            is redistributed, written or in a list, or this rank is not in the mesh.
        written: For the fast path of an operator that writes and has one result: the number of the
            argument that it returns.
        returns: For each result the position of the argument that is returned; None for new
            tensors.
        is_view: Whether results share memory with the first operand.
    """

    places: tuple[Place, ...]
    moves: tuple[tuple[DTensorSpec, DTensorSpec] | None, ...]
    restored: tuple[int, ...]
    local: Callable[..., Any]
    outputs: tuple[DTensorSpec | None, ...]
    output: DTensorSpec | tuple[DTensorSpec | None, ...] | None
    written: int | None
    returns: tuple[Place | None, ...]
    is_view: bool


def make_plan(call: OpCall, found: Rule) -> OperatorPlan:
    """Return the plan of a call.

    Raises:
        PlacementError: No strategy keeps the placements of the operands that are written, and
            written values cannot be moved back.
    """
    restored: list[int] = []
    if found.all_axes:
        (only,) = found.strategies(call)
        wanted, given = only.inputs, only.outputs
    else:
        options = found.options(call)
        try:
            wanted, given = choose(call, options)
        except PlacementError:
            wanted, given = choose(call, options, movable=True)
            restored = [n for n in written(call) if wanted[n] != call.operands[n].placements]
            if not all(can_be_restored(call.operands[n], wanted[n]) for n in restored):
                raise
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
    returned = tuple(place_of(call, name) for name in schema.returned)
    first = returned[0][0] if alone and len(returned) == 1 and returned[0] is not None else None
    output = None if schema.mutated or not alone else outputs
    if output is not None and len(output) < 2:
        output = next(iter(output), None)
    return OperatorPlan(
        places=call.places,
        moves=moves,
        restored=tuple(restored),
        local=_untraced(local or direct(call.op)) if inside else _nothing(schema.kinds, outputs),
        outputs=outputs,
        output=output,
        written=first if isinstance(first, int) else None,
        returns=returned,
        is_view=schema.is_view,
    )


def _untraced(local: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from compilation; not all its callers are excluded."""
    return untraced_below(local) if isinstance(local, FunctionType) else local


def place_of(call: OpCall, name: str | None) -> Place | None:
    """Return the position of the argument `name`; None if it is not an operand."""
    number = None if name is None else call.operand(name)
    return None if number is None else call.places[number]


def _nothing(kinds: Sequence[str], outputs: Sequence[DTensorSpec | None]) -> Callable[..., Any]:
    """Return the function of a rank outside the mesh: it returns empty parts and sends nothing."""
    is_list = len(kinds) == 1 and kinds[0].startswith("List")

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers = {n for n, kind in enumerate(kinds) if kind == "int" and not is_list}
        found = [
            (0 if n in numbers else None) if spec is None else spec.part_outside()
            for n, spec in enumerate(outputs)
        ]
        return found if is_list else found[0] if len(found) == 1 else tuple(found)

    return run


def can_be_restored(spec: DTensorSpec, moved: Sequence[Placement]) -> bool:
    """Return whether values with other placements can be written back to a tensor of this spec."""
    return not spec.meta.overlaps and all(
        not here.is_partial() or here == there or can_be_split(here, spec.meta.dtype)
        for here, there in zip(spec.placements, moved, strict=True)
    )


def restore(
    part: torch.Tensor, spec: DTensorSpec, values: torch.Tensor, moved: DTensorSpec
) -> None:
    """Write values that have other placements into the part of a tensor.

    Args:
        part: This rank's part, which is written.
        spec: The spec of the tensor.
        values: This rank's part of the new values.
        moved: The spec of the new values.
    """
    full = spec.replicated()
    if spec.partial:
        values, moved = redistribute(values, moved, full), full
    part.copy_(redistribute(values, moved, spec))


def depends_on_values(call: OpCall) -> bool:
    """Return whether the shape of a result depends on values, as with a mask as an index."""
    masked = any(spec.meta.dtype in (torch.bool, torch.uint8) for spec in call.operands[1:])
    return torch.Tag.dynamic_output_shape in call.op.tags and (
        masked or call.op is not torch.ops.aten.index.Tensor
    )


def depends_on_default_dtype(call: OpCall) -> bool:
    """Return whether the results have torch's default dtype, which a program may change."""
    named = call.has("dtype") and call.arg("dtype") is not None
    return (
        not named
        and any(meta is not None and _is_inexact(meta.dtype) for meta in call.outputs)
        and not any(_is_inexact(spec.meta.dtype) for spec in call.operands)
    )


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
