"""Reductions: sums, means, products, extremes, norms, and reading values.

A dimension that is not reduced may be sharded; the result is sharded, too. A reduced dimension may
be sharded if the result can be Partial: a sum, a product, a minimum, a maximum. Reductions that
need all elements at once (a variance, an index of the maximum) may not have sharded reduced
dimensions.

For a norm the ranks all-reduce the powers of their norms and take the root of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.comm.ops import ReduceOp
from dure.errors import NotInGroupError
from dure.tensor.call import SUM, AxisStrategy, Op, OpCall, R
from dure.tensor.dispatch import special
from dure.tensor.placement_types import Partial, Placement, Shard
from dure.tensor.redistribute import all_reduce_of, parts_along, redistribute
from dure.tensor.registry import by_value, rule, zeros_where_empty
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

__all__ = ["reduced_dims", "reduction", "weighed"]

aten = torch.ops.aten
AVG, MIN, MAX, PRODUCT = map(Partial, ("avg", "min", "max", "product"))


_NONE_WHEN_EMPTY = {aten.any.dims, aten.all.dims}
"""Operators that reduce nothing if the list of dimensions is empty; others reduce all of them."""


def reduced_dims(call: OpCall) -> set[int]:
    """Return the dimensions of operand 0 that are reduced."""
    ndim = call.operands[0].ndim
    dims = call.arg("dim") if call.has("dim") else None
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return set() if dims is not None and call.op in _NONE_WHEN_EMPTY else set(range(ndim))
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % ndim for dim in dims} if ndim else set()


def reduction(
    call: OpCall, terms: Sequence[Partial] | None, linear: Sequence[Partial] = ()
) -> list[AxisStrategy]:
    """Return the strategies of a reduction of operand 0.

    Args:
        call: The call.
        terms: The placements of the results if a reduced dimension is sharded; None if reduced
            dimensions may not be sharded.
        linear: Partial placements of the operand that the results keep.
    """
    spec, count, dims = call.operands[0], len(call.outputs), reduced_dims(call)
    keeps = bool(call.has("keepdim") and call.arg("keepdim"))
    found: list[AxisStrategy] = []
    for dim in range(spec.ndim):
        if dim in dims:
            if terms is not None:
                found.append(AxisStrategy((Shard(dim),), tuple(terms)))
            continue
        there = dim if keeps else dim - sum(d < dim for d in dims)
        found.append(AxisStrategy((Shard(dim),), (Shard(there),) * count))
    return found + [AxisStrategy((term,), (term,) * count) for term in linear]


def _linear_terms(call: OpCall) -> list[Partial]:
    """Return the Partial placements that a sum or mean preserves: if it does not cast numbers."""
    given, made = call.operands[0].meta.dtype, call.output.dtype
    if not (given.is_floating_point or given.is_complex):
        return [SUM] if given == made and given != torch.bool else []
    return [SUM, AVG] if given.is_complex == made.is_complex else []


@rule(aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count(call: OpCall) -> list[AxisStrategy]:
    return reduction(call, [SUM])


def _local_count(spec: DTensorSpec, dims: set[int]) -> int:
    """Return the number of this rank's elements that are reduced to one element."""
    return math.prod(spec.local_shape[dim] for dim in dims)


def _filled(spec: DTensorSpec | None, value: float | bool) -> Callable[..., torch.Tensor]:
    """Return a function that returns this rank's part of a result, filled with one value."""
    assert spec is not None
    shape, dtype = spec.local_shape, spec.meta.dtype
    return lambda tensor, *args, **kwargs: tensor.new_full(shape, value, dtype=dtype)


def weighed(call: OpCall, mine: int, total: int) -> Callable[..., Any] | None:
    """Weight this rank's mean by its share of the elements that are averaged."""
    op = call.op
    if mine == total:
        return None
    if mine == 0:
        return _filled(call.result, 0)
    share = mine / total
    return lambda *args, **kwargs: op(*args, **kwargs) * share


def _mean_local(call: OpCall) -> Callable[..., Any] | None:
    spec, dims = call.operands[0], reduced_dims(call)
    return weighed(call, _local_count(spec, dims), math.prod(spec.shape[dim] for dim in dims))


@rule(aten.sum.default, aten.sum.dim_IntList)
@rule(aten.mean.default, aten.mean.dim, local=_mean_local)
def _sum(call: OpCall) -> list[AxisStrategy]:
    return reduction(call, [SUM], _linear_terms(call))


@rule(aten.prod.default, aten.prod.dim_int)
def _product(call: OpCall) -> list[AxisStrategy]:
    made = call.output.dtype
    if made.is_complex:
        return reduction(call, None)
    same = call.operands[0].meta.dtype == made
    return reduction(call, [PRODUCT], [PRODUCT] if same else [])


# ---- extremes ------------------------------------------------------------------------------------

_LEAST = {aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims}


def _has_empty_part(spec: DTensorSpec, dim: int) -> bool:
    """Return whether any rank of the mesh has no element along a dimension."""
    sizes = {spec.shape[dim]}
    for cut in spec.cuts(dim):
        n = spec.mesh.shape[cut.axis]
        parts = [runs for size in sizes for runs in parts_along(size, cut, n)]
        sizes = {sum(length for length, _ in runs) for runs in parts}
    return 0 in sizes


def _extremes(call: OpCall, *terms: Partial, linear: Sequence[Partial] = ()) -> list[AxisStrategy]:
    """Return the strategies of extremes; no rank may have an empty part.

    An empty part has no extreme. A placeholder, such as the least integer for a maximum, would be
    below every other term, but operators on the Partial result may change that.
    """
    spec, dims = call.operands[0], reduced_dims(call)
    empty = {Shard(dim) for dim in dims if _has_empty_part(spec, dim)}
    return [s for s in reduction(call, terms, linear) if s.inputs[0] not in empty]


@rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(call: OpCall) -> list[AxisStrategy]:
    term = MIN if call.op in _LEAST else MAX
    return _extremes(call, term, linear=[term])


@rule(
    aten.any.default, aten.any.dim, aten.any.dims,
    aten.all.default, aten.all.dim, aten.all.dims,
)  # fmt: skip
def _truth(call: OpCall) -> list[AxisStrategy]:
    return reduction(call, [MIN if call.op in _LEAST else MAX])


@rule(aten.aminmax.default)
def _both(call: OpCall) -> list[AxisStrategy]:
    return _extremes(call, MIN, MAX)


@rule(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
    aten.median.dim, aten.nanmedian.dim, aten.kthvalue.default, aten.mode.default,
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
    local=zeros_where_empty,
)  # fmt: skip
def _all_at_once(call: OpCall) -> list[AxisStrategy]:
    return reduction(call, None)


# ---- norms ---------------------------------------------------------------------------------------

_TERMS_OF_NORMS = {math.inf: MAX, -math.inf: MIN, 0.0: SUM, 1.0: SUM}
"""Norms whose terms are reduced without powers, and the reduction."""


def _norm_local(call: OpCall) -> Callable[..., Any] | None:
    """If a reduced dimension is sharded, sum the powers of the ranks' norms and take the root.

    Powers are float64, so that they do not overflow if the norm fits its dtype.
    """
    order, dims = float(call.arg("ord")), reduced_dims(call)
    spec, result, op = call.operands[0], call.result, call.op
    empty = not _local_count(spec, dims) and all(spec.shape[dim] for dim in dims)
    own = _filled(result, math.inf if order < 0 else 0.0) if empty else op
    if order in _TERMS_OF_NORMS:
        return own
    axes = [
        axis for axis, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim in dims
    ]
    if not axes:
        return None

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        part = own(*args, **kwargs)
        powers = part.double().pow_(order)
        all_reduce_of(result, axes, powers, ReduceOp.SUM)
        return powers.pow_(1 / order).to(part.dtype)

    return norm


by_value.add(aten.linalg_vector_norm.default)


@rule(aten.linalg_vector_norm.default, local=_norm_local)
def _norm(call: OpCall) -> list[AxisStrategy]:
    term: Placement = _TERMS_OF_NORMS.get(float(call.arg("ord")), R)
    dims = reduced_dims(call)
    found = reduction(call, [SUM])
    return [AxisStrategy(s.inputs, (term,)) if s.inputs[0].dim in dims else s for s in found]


# ---- reading values ------------------------------------------------------------------------------


@special(aten._local_scalar_dense.default)
def _read(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if tensor.spec.coordinate is None:
        raise NotInGroupError(
            "a value was read on a rank outside the mesh",
            op="item",
            rank=tensor.spec.mesh.get_rank(),
            seen=str(tensor.spec),
            fix="Read it on ranks of the mesh: device_mesh.get_coordinate() is None on others.",
        )
    return op(redistribute(tensor.part, tensor.spec, tensor.spec.replicated()))


@special(aten.equal.default)
def _equal(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Compare the parts, then all-reduce whether they are equal."""
    left, right = args
    if left.shape != right.shape:
        return False
    spec = left.spec
    where = spec.without_partial().placements
    a, b = (redistribute(t.part, t.spec, t.spec.with_placements(where)) for t in (left, right))
    scalar = TensorMeta(torch.Size([]), (), torch.bool)
    flag = spec_of(spec.mesh, (MIN,) * spec.mesh.ndim, scalar)
    same = torch.tensor(op(a, b), device=left.part.device)
    return bool(redistribute(same, flag, flag.replicated()))


@special(aten.allclose.default)
def _allclose(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    close = aten.isclose.default(*args, **kwargs).all()
    return close.spec.coordinate is None or bool(close.item())
