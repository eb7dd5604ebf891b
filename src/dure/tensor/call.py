"""An operator's call as the rules see it: its arguments, without values and without ranks.

A call's *operands* are its DTensors in the order in which they appear among the arguments, those in
lists included. Rules name placements for operands and for results by these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from dure import torch_private
from dure.errors import ShapeError
from dure.tensor.placement_types import REDUCTIONS, Partial, Placement, Replicate
from dure.tensor.spec import DTensorSpec, TensorMeta

__all__ = [
    "DIRECT",
    "LINEAR",
    "SUM",
    "TERMS",
    "AxisStrategy",
    "Op",
    "OpCall",
    "Place",
    "R",
    "argument_at",
    "check_out",
    "direct",
    "fill",
    "linear_in",
    "outs_of",
    "same_placement",
    "schema_of",
    "with_one",
]

Op = torch_private.OpOverload
aten = torch.ops.aten
Place = tuple[int | str, int | None]
"""Position of an operand: number or name of its argument, and its index if that is a list."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of an operator.

    Attributes:
        names: Names of the arguments.
        defaults: Default values, by name.
        mutated: Names of the arguments that it writes.
        is_view: Whether a result shares memory with an argument that is not written.
        returned: For each result the name of the argument that is returned; None for a new tensor.
        kinds: Type of each result, such as "Tensor" or "List[Tensor]".
    """

    names: tuple[str, ...]
    defaults: dict[str, object]
    mutated: frozenset[str]
    is_view: bool
    returned: tuple[str | None, ...]
    kinds: tuple[str, ...]


@cache
def schema_of(op: Op) -> Schema:
    """Return the schema of an operator."""
    schema = op._schema  # pyright: ignore[reportPrivateUsage]
    alias = {a.name: a.alias_info for a in schema.arguments}
    by_set = {
        min(info.before_set, default=n): n  # lists have none
        for n, info in alias.items()
        if info is not None and info.is_write
    }
    written = frozenset(by_set.values())
    returned = [r.alias_info for r in schema.returns]
    return Schema(
        names=tuple(a.name for a in schema.arguments),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        mutated=written,
        is_view=not written and any(info is not None for info in alias.values()),
        returned=tuple(
            by_set.get(min(info.before_set, default=""))
            if info is not None and info.is_write
            else None
            for info in returned
        ),
        kinds=tuple(str(r.type) for r in schema.returns),
    )


DIRECT: dict[Op, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.clone.default: torch.clone,
    aten.detach.default: torch.detach,
    aten.div.Tensor: torch.div,
    aten.expand.default: torch.Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.relu.default: torch.relu,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
"""Functions of torch that call the same operator half a microsecond faster."""


def direct(op: Op) -> Callable[..., Any]:
    """Return the quickest way to call an operator on plain tensors."""
    return DIRECT.get(op, op._op)  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True)
class OpCall:
    """A call of an operator.

    Attributes:
        op: The operator.
        args, kwargs: The arguments, each DTensor replaced by its spec.
        operands: The specs of the operands; once a strategy was chosen, the specs it requires.
        places: The position of each operand.
        outputs: Shape, strides and dtype of each result that is a tensor, None for others.
        results: The spec of each result, once a strategy was chosen.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[DTensorSpec, ...]
    places: tuple[Place, ...]
    outputs: tuple[TensorMeta | None, ...] = ()
    results: tuple[DTensorSpec | None, ...] = ()
    _bound: dict[str, Any] = field(default_factory=dict)

    def arg(self, name: str) -> Any:
        """Return an argument by its name in the schema, or its default if it was not passed."""
        if not self._bound:
            schema = schema_of(self.op)
            self._bound = {
                **schema.defaults,
                **dict(zip(schema.names, self.args, strict=False)),
                **self.kwargs,
            }
        return self._bound[name]

    def has(self, name: str) -> bool:
        """Return whether the operator has an argument of this name."""
        return name in schema_of(self.op).names

    def operand(self, name: str) -> int | None:
        """Return the number of the operand that is the argument `name`; None if it is not one."""
        names = schema_of(self.op).names
        for number, (where, inside) in enumerate(self.places):
            if inside is None and name == (names[where] if isinstance(where, int) else where):
                return number
        return None

    def spec(self, name: str) -> DTensorSpec:
        """Return the spec of the operand that is the argument `name`."""
        number = self.operand(name)
        assert number is not None
        return self.operands[number]

    @property
    def name(self) -> str:
        """The operator's name, such as "aten.add.Tensor"."""
        return str(self.op)

    @property
    def output(self) -> TensorMeta:
        """Shape, strides and dtype of the first result, which must be a tensor."""
        first = self.outputs[0]
        assert first is not None
        return first

    @property
    def result(self) -> DTensorSpec:
        """The spec of the first result, which must be a tensor."""
        first = self.results[0]
        assert first is not None
        return first


def outs_of(call: OpCall) -> list[int]:
    """Return the numbers of the operands passed as ``out=``, under any name.

    Operands in lists are left out: torch does not resize these to the shape of the result either.
    """
    mutated = schema_of(call.op).mutated
    return [
        n for n, (where, inside) in enumerate(call.places) if where in mutated and inside is None
    ]


def check_out(call: OpCall, number: int, made: torch.Size) -> None:
    """Raise if an ``out=`` does not have the shape of the result: a DTensor is not resized.

    Raises:
        ShapeError: It has another shape.
    """
    spec = call.operands[number]
    if spec.shape != made:
        raise ShapeError(
            "out= has another shape than the result, and a DTensor is not resized",
            op=call.name,
            seen=f"{spec}, expected the shape {list(made)}",
            fix="Omit out=, or pass one of the result's shape.",
        )


def fill(
    args: Sequence[Any], kwargs: dict[str, Any], places: Sequence[Place], values: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with the operands replaced by `values`."""
    filled, named = list(args), dict(kwargs)
    copied: set[int | str] = set()
    for (where, inside), value in zip(places, values, strict=True):
        holder: Any = filled if isinstance(where, int) else named
        if inside is None:
            holder[where] = value
            continue
        if where not in copied:
            copied.add(where)
            holder[where] = list(holder[where])
        holder[where][inside] = value
    return filled, named


def argument_at(sources: tuple[Any, Any], place: Place) -> Any:
    """Return the operand at a place of (args, kwargs)."""
    where, inside = place
    holder = sources[0][where] if isinstance(where, int) else sources[1][where]
    return holder if inside is None else holder[inside]


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """Placements of operands and results that are valid together on one mesh axis.

    Attributes:
        inputs: A placement for each operand.
        outputs: A placement for each result that is a tensor.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


R, SUM = Replicate(), Partial("sum")
LINEAR = (SUM, Partial("avg"))
TERMS = tuple(map(Partial, REDUCTIONS))


def same_placement(call: OpCall, placements: Iterable[Placement]) -> list[AxisStrategy]:
    """Return strategies in which all operands and all results have the same placement."""
    return [AxisStrategy((p,) * len(call.operands), (p,) * len(call.outputs)) for p in placements]


def linear_in(call: OpCall) -> tuple[Partial, ...]:
    """Return the Partial placements that a linear operator preserves.

    Sums always; averages if they are exact. Averages of integers are truncated, so averages are
    included if the results are floating point or complex, and so are the operands that are
    Partial("avg"); other operands may be integers.
    """
    dtypes = [meta.dtype for meta in call.outputs if meta is not None]
    for spec in call.operands:
        if any(p.is_partial("avg") for p in spec.placements):
            dtypes.append(spec.meta.dtype)
    return LINEAR if all(d.is_floating_point or d.is_complex for d in dtypes) else (SUM,)


def with_one(
    call: OpCall, placements: Iterable[Placement] | None = None, number: int = 0
) -> list[AxisStrategy]:
    """Return strategies in which the results have an operand's placement; others are replicated.

    Args:
        call: The call.
        placements: The placements of the operand; those of `linear_in` if None.
        number: The number of the operand.
    """
    others = range(len(call.operands))
    placements = linear_in(call) if placements is None else placements
    return [
        AxisStrategy(tuple(p if i == number else R for i in others), (p,) * len(call.outputs))
        for p in placements
    ]
