"""Sharding rules: for each operator, the valid placements on one mesh axis.

A rule is a function of an `OpCall` that returns a list of `AxisStrategy`. Each strategy names a
placement for every operand and every result, on one axis, and must be exact for all values: tests
compare every rule with the unsharded operator by brute force. The strategy in which everything is
replicated is always valid and is not listed.

expand.py chooses a strategy for each axis. A rule may have a second function, `local`, for
operators that cannot simply be called on the parts: they need other sizes, a mask, or another
operator. It is called once for each combination of specs and returns the function to call on the
parts.

Each file of `rules/` contains one family of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dure import torch_private
from dure.comm.world import when_left
from dure.tensor.call import AxisStrategy, Op, OpCall, direct, schema_of
from dure.tensor.placement_types import Placement, Shard, StridedShard
from dure.tensor.spec import DTensorSpec
from dure.tensor.strides import is_dense, laid
from dure.torch_private import pytree

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
"""Called instead of the operator, with its arguments and this rank's parts as operands.

It is cached and used for calls with other floats; it must read floats from its arguments.
"""
MakeLocal = Callable[[OpCall], Local | None]
"""Takes a call with the specs of operands and results; None means to call the operator itself."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of an operator.

    Attributes:
        strategies: Returns the valid strategies on one axis.
        local: Returns the function to call on the parts; see the module's docstring.
        contiguous: Whether strategies with `Shard` are valid for consecutive parts only. Otherwise
            they are valid for `StridedShard`, too: dimensions that are cut together have one size.
        all_axes: Whether it handles all axes at once, as for reshapes: it returns one strategy with
            a tuple of placements for each operand and result.
    """

    strategies: Callable[[OpCall], list[AxisStrategy]]
    local: MakeLocal | None = None
    contiguous: bool = False
    all_axes: bool = False

    def options(self, call: OpCall) -> list[AxisStrategy]:
        """Return the valid strategies on one axis, including strided cuts if operands have any."""
        found = self.strategies(call)
        placements = [p for spec in call.operands for p in spec.placements]
        strided = [p.split_factor for p in placements if isinstance(p, StridedShard)]
        if not strided or self.contiguous:
            return found
        cut = [s for s in found if any(isinstance(p, Shard) for p in (*s.inputs, *s.outputs))]
        return found + [_strided(s, factor) for factor in dict.fromkeys(strided) for s in cut]


def _strided(strategy: AxisStrategy, factor: int) -> AxisStrategy:
    """Return a strategy with StridedShard in the place of Shard."""

    def one(p: Placement) -> Placement:
        return StridedShard(p.dim, split_factor=factor) if isinstance(p, Shard) else p

    return AxisStrategy(tuple(map(one, strategy.inputs)), tuple(map(one, strategy.outputs)))


_rules: dict[Op | torch.Tag, Rule] = {}
by_value: set[Op] = set()
"""Operators whose rule depends on the value of a float argument."""


def rule(
    *ops: Op | torch.Tag,
    local: MakeLocal | None = None,
    contiguous: bool = False,
    all_axes: bool = False,
) -> Callable[..., Any]:
    """Register the decorated function as the rule of these operators; see `Rule`.

    The rule of a tag applies to all operators with the tag that have no rule themselves.
    """

    def register(strategies: Callable[[OpCall], list[AxisStrategy]]) -> Any:
        _rules.update(dict.fromkeys(ops, Rule(strategies, local, contiguous, all_axes)))
        return strategies

    return register


def zeros_where_empty(call: OpCall) -> Local | None:
    """Return zeros on ranks with an empty part, for which kernels raise or warn (a `MakeLocal`).

    For operators whose results are then empty, or Partial("sum").
    """
    if all(
        local or not full
        for spec in call.operands
        for local, full in zip(spec.local_shape, spec.shape, strict=True)
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

    Raised by a `Local`, before anything is sent. `dispatch` then returns `copy`, marked as a copy.

    Attributes:
        copy: The operator's result for a copy of the part that has the strides of the spec.
    """

    def __init__(self, copy: torch.Tensor) -> None:
        super().__init__()
        self.copy = copy


def view_or_copy(
    op: Callable[..., torch.Tensor], spec: DTensorSpec, tensor: torch.Tensor, *args: Any
) -> torch.Tensor:
    """View a part, whose strides may differ from those of its spec.

    Raises:
        OtherStrides: They do not allow the view.
    """
    try:
        return op(tensor, *args)
    except RuntimeError:
        raise OtherStrides(op(laid(tensor, spec.order), *args)) from None


is_alias = torch_private.is_alias_of
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
    """Copy operands that share memory with a written operand, if torch raises because of that.

    Torch raises before it writes. Other errors of the operator, such as a lack of memory, are
    raised unchanged. Returns None if torch cannot raise (`may_overlap`).
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
    """Replace an argument, which must not have a default, and call the operator."""
    place, op = schema_of(call.op).names.index(name), call.op
    return lambda *args, **kwargs: op(*args[:place], value, *args[place + 1 :], **kwargs)


def with_local_size(call: OpCall) -> Local:
    """Pass the size of this rank's part of the result as the second argument."""
    shape, op = call.result.local_shape, direct(call.op)
    return lambda tensor, size, *args, **kwargs: op(tensor, shape, *args, **kwargs)


def rule_of(op: Op) -> Rule | None:
    """Return the rule of an operator, or None."""
    found = _rules.get(op)
    if found is None and torch.Tag.pointwise in op.tags:
        return _rules[torch.Tag.pointwise]
    return found
