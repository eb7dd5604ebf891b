"""Indexing by tensors of indices, and the inverses of views of a part of a tensor.

The indexed dimension must not be sharded; the others may be. An exception is `gather` of one
element per line, such as the logit of a label: then each rank returns zeros for elements that it
does not have, and the result is Partial. If the source is replicated, the indices may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.comm.capture import has_no_values
from dure.tensor.call import (
    LINEAR,
    SUM,
    TERMS,
    AxisStrategy,
    OpCall,
    R,
    linear_in,
    same_placement,
    with_one,
)
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, with_local_size
from dure.tensor.rules.embedding import own_rows
from dure.tensor.rules.views import without

aten = torch.ops.aten


def _dim(call: OpCall) -> int:
    return call.arg("dim") % max(call.operands[0].ndim, 1)


def _gather_local(call: OpCall) -> Callable[..., Any] | None:
    """Gather this rank's elements of a sharded dimension, and zeros for the others.

    Raises:
        RuntimeError: An index is out of bounds, as by the operator itself.
    """
    source, dim, op = call.operands[0], _dim(call), call.op
    if not source.ndim or not source.cuts(dim):
        return None
    run, size = source.runs(dim)[0], source.shape[dim]

    def gather(part: torch.Tensor, _: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        unread = index.is_cuda or has_no_values((index,))
        if not unread and ((index < 0) | (index >= size)).any():
            raise RuntimeError(f"index out of bounds for dimension {dim} with size {size}")
        if not part.shape[dim]:
            return part.new_zeros(index.shape)
        own, missing = own_rows(index, run)
        return op(part, dim, own, **kwargs).masked_fill_(missing, 0)

    return gather


@rule(aten.gather.default, local=_gather_local)
def _gather(call: OpCall) -> list[AxisStrategy]:
    source, index = call.operands
    dim = _dim(call)
    found = with_one(call, TERMS)
    if not source.ndim or source.ndim != index.ndim:
        return found
    for d in range(index.ndim):
        if d == dim:
            found.append(AxisStrategy((R, Shard(d)), (Shard(d),)))
            if index.shape[d] == 1 and source.meta.dtype != torch.bool:
                found.append(AxisStrategy((Shard(d), R), (SUM,)))
        elif source.shape[d] == index.shape[d]:
            found.append(AxisStrategy((Shard(d), Shard(d)), (Shard(d),)))
    return found


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default, aten.scatter_reduce.two,
)  # fmt: skip
def _scatter(call: OpCall) -> list[AxisStrategy]:
    specs = call.operands
    found: list[AxisStrategy] = []
    if call.op in (aten.scatter.src, aten.scatter_add.default):
        found += [AxisStrategy((term, R, term), (term,)) for term in linear_in(call)]
    if specs[0].ndim and len({spec.ndim for spec in specs}) == 1:
        for d in range(specs[0].ndim):
            if d != _dim(call) and len({spec.shape[d] for spec in specs}) == 1:
                found.append(AxisStrategy((Shard(d),) * len(specs), (Shard(d),)))
    return found


@rule(aten.index_select.default)
def _index_select(call: OpCall) -> list[AxisStrategy]:
    source, index = call.operands
    found = with_one(call, TERMS)
    if source.ndim:
        found += [
            AxisStrategy((Shard(d), R), (Shard(d),)) for d in range(source.ndim) if d != _dim(call)
        ]
        if index.ndim:
            found.append(AxisStrategy((R, Shard(0)), (Shard(_dim(call)),)))
    return found


@rule(
    aten.index_add.default, aten.index_copy.default, aten.index_reduce.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
)  # fmt: skip
def _index_written(call: OpCall) -> list[AxisStrategy]:
    target = call.operands[0]
    filled = "index_fill" in call.name
    rest = call.operands[2:]
    found: list[AxisStrategy] = []
    if call.op in (aten.index_add.default, aten.index_copy.default):
        found += [AxisStrategy((term, R, term), (term,)) for term in linear_in(call)]
    for d in range(target.ndim):
        if d == _dim(call) or not (filled or rest[0].ndim == target.ndim):
            continue
        others = (R if filled else Shard(d),) * len(rest)
        found.append(AxisStrategy((Shard(d), R, *others), (Shard(d),)))
    return found


# ---- several indices -----------------------------------------------------------------------------


def _indexed(call: OpCall) -> tuple[list[int], int, int] | None:
    """Return the indexed dimensions, and position and number of the result's index dimensions.

    None if an index is a mask: the shape of the result depends on its values.
    """
    indices = call.arg("indices")
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not given or any(i.meta.dtype in (torch.bool, torch.uint8) for _, i in given):
        return None
    dims = [d for d, _ in given]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, dims[0] if adjacent else 0, max(i.ndim for _, i in given)


def _there(d: int, dims: Sequence[int], begin: int, made: int) -> int:
    """Return the position in the result of dimension d of the source, which is not indexed."""
    before = sum(1 for one in dims if one < d)
    return d - before + (made if d - before >= begin else 0)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: OpCall) -> list[AxisStrategy]:
    found_dims = _indexed(call)
    if found_dims is None:
        return []
    dims, begin, made = found_dims
    source, *indices = call.operands
    replicated = (R,) * len(indices)
    found = with_one(call, TERMS)
    for d in range(source.ndim):
        if d not in dims:
            there = Shard(_there(d, dims, begin, made))
            found.append(AxisStrategy((Shard(d), *replicated), (there,)))
    for d in range(made):
        inputs: list[Placement] = []
        for index in indices:
            own = d - (made - index.ndim)
            cut = own >= 0 and index.shape[own] == call.output.shape[begin + d]
            inputs.append(Shard(own) if cut else R)
        found.append(AxisStrategy((R, *inputs), (Shard(begin + d),)))
    return found


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: OpCall) -> list[AxisStrategy]:
    found_dims = _indexed(call)
    if found_dims is None:
        return []
    dims, begin, made = found_dims
    target, *indices, values = call.operands
    replicated = (R,) * len(indices)
    found = [AxisStrategy((term, *replicated, term), (term,)) for term in linear_in(call)]
    result_ndim = target.ndim - len(dims) + made
    for d in range(target.ndim):
        if d in dims:
            continue
        own = _there(d, dims, begin, made) - (result_ndim - values.ndim)
        cut = own >= 0 and values.shape[own] == target.shape[d]
        found.append(AxisStrategy((Shard(d), *replicated, Shard(own) if cut else R), (Shard(d),)))
    return found


# ---- inverses of views ---------------------------------------------------------------------------


def _put_back(call: OpCall, to: Sequence[int | None]) -> list[AxisStrategy]:
    """Return strategies of an operator that writes its last operand into its first one.

    Args:
        call: The call.
        to: For each dimension of the result its position in the last operand; None if it has none.
    """
    found: list[AxisStrategy] = []
    first = len(call.operands) > 1
    for d, there in enumerate(to):
        if there is not None:
            inputs = (Shard(d), Shard(there)) if first else (Shard(there),)
            found.append(AxisStrategy(inputs, (Shard(d),)))
    return found + same_placement(call, LINEAR)


@rule(aten.select_backward.default, local=with_local_size)
@rule(aten.select_scatter.default)
def _selected(call: OpCall) -> list[AxisStrategy]:
    return _put_back(call, without(len(call.output.shape), [call.arg("dim")]))


@rule(aten.diagonal_backward.default, local=with_local_size)
@rule(aten.diagonal_scatter.default)
def _diagonal(call: OpCall) -> list[AxisStrategy]:
    gone = call.arg("dim1"), call.arg("dim2")
    return _put_back(call, without(len(call.output.shape), gone))


@rule(aten.slice_backward.default, aten.unfold_backward.default, local=with_local_size)
@rule(aten.slice_scatter.default)
def _sliced(call: OpCall) -> list[AxisStrategy]:
    ndim = len(call.output.shape)
    dim = call.arg("dim") % max(ndim, 1)
    return _put_back(call, [None if d == dim else d for d in range(ndim)])
