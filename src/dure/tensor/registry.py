"""Rules: for each operator, what is legal on one mesh axis.

A rule is a function of an `OpCall` that returns a list of `Strategy`; each names a placement for
every operand and every result, on one axis. It may only name what holds for that operator exactly,
whatever the values: every rule is compared with the unsharded operator by brute force. That
everything is replicated is always legal and need not be named.

`expand` (expand.py) chooses for each axis. A rule may give a second function, `local`, where the
operator on the parts is not the operator on the whole with the parts put in: other sizes, a mask,
another operator. It is called once for each combination of specs, and returns what runs on the
parts.

A family of operators is a file of `rules/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dure.comm.world import when_left
from dure.tensor.call import Op, OpCall, Strategy, direct, schema_of
from dure.tensor.placement_types import Placement, Shard, StridedShard
from dure.tensor.spec import DTensorSpec
from dure.tensor.strides import is_dense, laid

__all__ = [
    "Local",
    "MakeLocal",
    "OtherStrides",
    "Rule",
    "by_value",
    "copying_overlaps",
    "is_alias",
    "may_overlap",
    "rule",
    "rule_of",
    "view_or_copy",
    "with_argument",
    "with_local_size",
    "zeros_where_empty",
]

Local = Callable[..., Any]
"""Runs in the operator's place: takes its arguments, with this rank's parts for the operands.

Floats among the arguments may differ from those of the call that it was made for: it takes them as
they come.
"""
MakeLocal = Callable[[OpCall], Local | None]
"""Given the call, with the specs of operands and results; None for the operator as it is."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of an operator.

    Attributes:
        strategies: Returns what is legal on one axis.
        local: See the head of this file.
        contiguous: Whether what is said of cuts holds for consecutive parts only. Else it holds
            for `StridedShard` as well: dimensions that are cut together have one size.
        all_axes: Whether it sees all axes at once, as the view family does: it returns one
            strategy, of a placement for each axis.
    """

    strategies: Callable[[OpCall], list[Strategy]]
    local: MakeLocal | None = None
    contiguous: bool = False
    all_axes: bool = False

    def options(self, call: OpCall) -> list[Strategy]:
        """Return what is legal on one axis, with the strided cuts that the operands have."""
        found = self.strategies(call)
        placements = [p for spec in call.operands for p in spec.placements]
        strided = [p.split_factor for p in placements if isinstance(p, StridedShard)]
        if not strided or self.contiguous:
            return found
        cut = [s for s in found if any(isinstance(p, Shard) for p in (*s.inputs, *s.outputs))]
        return found + [_strided(s, factor) for factor in dict.fromkeys(strided) for s in cut]


def _strided(strategy: Strategy, factor: int) -> Strategy:
    """Return a strategy with strided cuts in the place of its cuts."""

    def one(p: Placement) -> Placement:
        return StridedShard(p.dim, split_factor=factor) if isinstance(p, Shard) else p

    return Strategy(tuple(map(one, strategy.inputs)), tuple(map(one, strategy.outputs)))


_rules: dict[Op | torch.Tag, Rule] = {}
by_value: set[Op] = set()
"""Operators whose rule looks at the value of a float; those of others decide nothing."""


def rule(
    *ops: Op | torch.Tag,
    local: MakeLocal | None = None,
    contiguous: bool = False,
    all_axes: bool = False,
) -> Callable[..., Any]:
    """Register the decorated function as the rule of these operators; see `Rule`.

    The rule of a tag is that of all operators that have it, and none of their own.
    """

    def register(strategies: Callable[[OpCall], list[Strategy]]) -> Any:
        _rules.update(dict.fromkeys(ops, Rule(strategies, local, contiguous, all_axes)))
        return strategies

    return register


def zeros_where_empty(call: OpCall) -> Local | None:
    """Return zeros on ranks with an empty part, where kernels refuse or warn: a `MakeLocal`.

    For operators whose results are then empty, or terms of a sum.
    """
    if all(
        own or not whole
        for spec in call.operands
        for own, whole in zip(spec.local_shape, spec.shape, strict=True)
    ):
        return None
    made = [None if r is None else (r.local_shape, r.meta.dtype) for r in call.results]
    kinds = schema_of(call.op).kinds
    numbers = {n for n, kind in enumerate(kinds) if kind == "int"}

    def zeros(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = [
            (0 if n in numbers else None) if m is None else first.new_zeros(m[0], dtype=m[1])
            for n, m in enumerate(made)
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)

    return zeros


class OtherStrides(Exception):
    """A view that the strides of a part do not allow, although those of the full tensor do.

    Raised by a `Local`, before anything is sent. What `dispatch` returns is marked as a copy.

    Attributes:
        copy: What the operator returns for a copy of the part, stored as the spec says.
    """

    def __init__(self, copy: torch.Tensor) -> None:
        super().__init__()
        self.copy = copy


def view_or_copy(
    op: Callable[..., torch.Tensor], spec: DTensorSpec, tensor: torch.Tensor, *args: Any
) -> torch.Tensor:
    """View a part, whose strides may be others than its spec says.

    Raises:
        OtherStrides: They do not allow it.
    """
    try:
        return op(tensor, *args)
    except RuntimeError:
        raise OtherStrides(op(laid(tensor, spec.order), *args)) from None


is_alias: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # pyright: ignore
"""Return whether two tensors have one storage."""


@lru_cache(maxsize=1 << 12)
def may_overlap(spec: DTensorSpec) -> bool:
    """Return whether torch may refuse to write parts of such tensors, though not full ones.

    Torch refuses to write a tensor that shares memory with one that is read, if both are dense and
    their strides or their first elements differ. Of two views of a tensor whose strides are equal,
    the parts can have other strides, along a dimension of one element. And views that have gaps,
    so that torch does not compare them, can have parts that are dense.
    """
    return 1 in spec.local_shape or not is_dense(spec.meta.empty())


when_left.append(may_overlap.cache_clear)


def copying_overlaps(call: OpCall) -> Local | None:
    """Copy what is read if torch refuses that it shares memory with what is written.

    Other errors of the operator, such as a lack of memory, are raised as they are.

    Torch refuses before it writes. None if that cannot be (`may_overlap`).
    """
    names, mutated = schema_of(call.op).names, schema_of(call.op).mutated
    if not mutated or len(call.operands) < 2 or not any(map(may_overlap, call.operands)):
        return None
    run = direct(call.op)

    def local(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "single memory location" not in str(error):
                raise
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            targets = pytree.tree_leaves([given.get(name) for name in mutated])
            copied: list[torch.Tensor] = []

            def copy(tensor: torch.Tensor) -> torch.Tensor:
                if not any(tensor is not t and is_alias(tensor, t) for t in targets):
                    return tensor
                copied.append(tensor.clone())
                return copied[-1]

            again = pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
            if not copied:
                raise
        return run(*again[0], **again[1])

    return local


def with_argument(call: OpCall, name: str, value: Any) -> Local:
    """Give the operator another value as the argument of this name, one that has no default."""
    place, op = schema_of(call.op).names.index(name), call.op
    return lambda *args, **kwargs: op(*args[:place], value, *args[place + 1 :], **kwargs)


def with_local_size(call: OpCall) -> Local:
    """Give the operator the size of this rank's part of the result as its second argument."""
    shape, op = call.result.local_shape, direct(call.op)
    return lambda tensor, size, *args, **kwargs: op(tensor, shape, *args, **kwargs)


def rule_of(op: Op) -> Rule | None:
    """Return the rule of an operator; None if it has none."""
    found = _rules.get(op)
    if found is None and torch.Tag.pointwise in op.tags:
        return _rules[torch.Tag.pointwise]
    return found
