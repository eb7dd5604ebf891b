"""Matrix products: rows, columns, the inner dimension, and batches may be sharded.

If the inner dimension is sharded, the product is Partial, and only the first rank along that axis
adds the bias. A product is linear in each factor: if one is Partial and the other replicated, the
product is Partial, too.

*Kernels of low precision.* `_int_mm`, `_scaled_mm`, `_grouped_mm` and `_scaled_grouped_mm` take
only some sizes and layouts on a GPU, so a dimension is sharded only if every rank gets an equal
part of such a size. Factors that are scaled by rows, or by columns, have their scales cut with
them. A group of `_grouped_mm` is a number of consecutive rows (or columns), which must be on one
rank; with a batch, a group is an element of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dure.tensor.call import SUM, AxisStrategy, OpCall, R, linear_in
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, zeros_where_empty
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten


def _products(call: OpCall, batch: bool) -> list[tuple[Placement, Placement, Placement]]:
    """Return the valid placements of left, right, and their product."""
    b = int(batch)
    found: list[tuple[Placement, Placement, Placement]] = [
        (Shard(b), R, Shard(b)),
        (R, Shard(b + 1), Shard(b + 1)),
        (Shard(b + 1), Shard(b), SUM),
    ]
    if batch:
        found.append((Shard(0), Shard(0), Shard(0)))
    for term in linear_in(call):
        found += [(term, R, term), (R, term, term)]
    return found


@rule(aten.mm.default, aten.bmm.default)
def _product(call: OpCall) -> list[AxisStrategy]:
    return [AxisStrategy((a, b), (c,)) for a, b, c in _products(call, call.op is aten.bmm.default)]


def _added_once(call: OpCall) -> Callable[..., Any] | None:
    """Add the bias only on the first of the ranks whose terms are summed."""
    bias, left, _ = call.operands
    axes = [
        axis
        for axis, placement in enumerate(left.placements)
        if placement.is_shard(left.ndim - 1) and bias.placements[axis].is_replicate()
    ]
    at, op = bias.coordinate or (0,) * len(bias.placements), call.op
    if not any(at[axis] for axis in axes):
        return None
    return lambda *args, **kwargs: op(*args, **{**kwargs, "beta": 0})


@rule(aten.addmm.default, aten.baddbmm.default, local=_added_once)
def _addmm(call: OpCall) -> list[AxisStrategy]:
    batch = "baddbmm" in call.name
    bias, ndim = call.operands[0], 2 + batch
    found: list[AxisStrategy] = []
    for a, b, c in _products(call, batch):
        if isinstance(c, Shard):
            own = c.dim - (ndim - bias.ndim)
            broadcast = own < 0 or bias.shape[own] == 1
            found.append(AxisStrategy((R if broadcast else Shard(own), a, b), (c,)))
        else:
            found.append(AxisStrategy((c, a, b), (c,)))
            if isinstance(a, Shard):
                found.append(AxisStrategy((R, a, b), (c,)))
    return found


# ---- kernels of low precision --------------------------------------------------------------------

_WIDTH = 16
"""Inner dimensions and columns are multiples of it: 16 bytes, for float8."""
_MORE_ROWS = 16
"""`_int_mm` takes only more rows than these."""


def _can_cut(spec: DTensorSpec, dim: int) -> bool:
    """Whether all ranks can have equal parts that the kernels take, over any axes of the mesh."""
    return spec.shape[dim] % (_WIDTH * spec.mesh.size()) == 0


@rule(aten._int_mm.default)
def _int_product(call: OpCall) -> list[AxisStrategy]:
    left, right = call.operands
    found: list[AxisStrategy] = []
    if _can_cut(left, 0) and left.shape[0] // left.mesh.size() > _MORE_ROWS:
        found.append(AxisStrategy((Shard(0), R), (Shard(0),)))
    if _can_cut(right, 1):
        found.append(AxisStrategy((R, Shard(1)), (Shard(1),)))
    if _can_cut(left, 1):
        found.append(AxisStrategy((Shard(1), Shard(0)), (SUM,)))
    return found


def _stored_by_columns(call: OpCall) -> Callable[..., Any]:
    """Give the kernel a left factor that is stored by rows, and a right one by columns."""
    op, empty = call.op, zeros_where_empty(call)
    if empty is not None:
        return empty

    def run(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        by_columns = right
        if right.stride(-2) != 1:
            by_columns = right.transpose(-2, -1).contiguous().transpose(-2, -1)
        return op(left.contiguous(), by_columns, *args, **kwargs)

    return run


@rule(aten._scaled_mm.default, local=_stored_by_columns)
def _scaled_product(call: OpCall) -> list[AxisStrategy]:
    """Return strategies for one scale of each factor, or one for each row and each column."""
    left, right = call.operands[:2]
    of_rows, of_columns = call.spec("scale_a"), call.spec("scale_b")
    one = of_rows.shape.numel() == of_columns.shape.numel() == 1
    each = of_rows.shape == (left.shape[0], 1) and of_columns.shape == (1, right.shape[1])
    if not (one or each):  # scales of blocks
        return []
    found: list[AxisStrategy] = []
    bias = call.operand("bias")

    def add(left_cut: Placement, right_cut: Placement, product: Placement) -> None:
        placements: list[Placement] = [R] * len(call.operands)
        placements[:2] = left_cut, right_cut
        if each and product == Shard(0):
            placements[2] = Shard(0)
        if each and product == Shard(1):
            placements[3] = Shard(1)
        if bias is not None and product == Shard(1):
            placements[bias] = Shard(0)
        found.append(AxisStrategy(tuple(placements), (product,)))

    if left.shape[0] % left.mesh.size() == 0:
        add(Shard(0), R, Shard(0))
    if _can_cut(right, 1):
        add(R, Shard(1), Shard(1))
    made = call.outputs[0]
    assert made is not None
    sums = made.dtype.itemsize > 1 and call.operand("scale_result") is None
    if bias is None and sums and _can_cut(left, 1):
        add(Shard(1), Shard(0), SUM)
    return found


_GROUPED: dict[tuple[int, int], tuple[tuple[int | None, int | None, Placement], ...]] = {
    (2, 3): ((None, 2, Shard(1)), (1, 1, SUM)),  # groups of rows
    (3, 2): ((1, None, Shard(0)), (2, 0, SUM)),  # groups of columns
    (2, 2): ((0, None, Shard(1)), (None, 1, Shard(2))),  # groups of the inner dimension
    (3, 3): ((0, 0, Shard(0)), (1, None, Shard(1)), (None, 2, Shard(2)), (2, 1, SUM)),
}
"""By the factors' dimensions: which of them may be cut (None: neither is), and the product."""


@rule(aten._grouped_mm.default)
def _grouped_product(call: OpCall) -> list[AxisStrategy]:
    if call.operand("bias") is not None:
        return []
    others = (R,) * (len(call.operands) - 2)
    return [AxisStrategy((a, b, *others), (product,)) for a, b, product in _grouped_cuts(call)]


def _grouped_cuts(call: OpCall) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield the placements of both factors and of the product, where the kernels take the parts."""
    left, right = call.operands[:2]
    for a, b, product in _GROUPED[left.ndim, right.ndim]:
        by_batch = product == Shard(0) and a == b == 0
        sizes = [(spec, dim) for spec, dim in ((left, a), (right, b)) if dim is not None]
        if by_batch or all(_can_cut(spec, dim) for spec, dim in sizes):
            yield R if a is None else Shard(a), R if b is None else Shard(b), product


@rule(aten._scaled_grouped_mm.default, local=_stored_by_columns)
def _scaled_grouped_product(call: OpCall) -> list[AxisStrategy]:
    """Return strategies for one scale for each row and each column, in float32.

    The scales of a factor with groups are a row for each group. Groups of the inner dimension have
    scales of their own for each row, so there neither rows nor columns are cut.
    """
    left, right = call.operands[:2]
    of_rows, of_columns = call.spec("scale_a"), call.spec("scale_b")
    by_row = of_rows.shape == left.shape[:-1] and of_rows.meta.dtype == torch.float32
    by_column = of_columns.shape == (*right.shape[:-2], right.shape[-1])
    if not (by_row and by_column) or left.ndim == right.ndim == 2:
        return []
    if call.operand("bias") is not None or call.operand("scale_result") is not None:
        return []
    found: list[AxisStrategy] = []
    for a, b, product in _grouped_cuts(call):
        placements = [a, b, *(R,) * (len(call.operands) - 2)]
        if isinstance(a, Shard) and a.dim < left.ndim - 1:
            placements[2] = a
        if isinstance(b, Shard) and b.dim != right.ndim - 2:
            placements[3] = Shard(min(b.dim, of_columns.ndim - 1))
        found.append(AxisStrategy(tuple(placements), (product,)))
    return found
