"""Indexing: by tensors of indices, and the inverses of the views that take a part.

An index looks along one dimension, which must be unsharded, except where `gather` takes one element
per line, such as the logit of a label: then each rank gives zeros for what it lacks. Cuts through
the others go along. Where several indices make dimensions of the result, a cut of those goes along
with the source whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.comm.capture import has_no_values
from dure.tensor.call import LINEAR, SUM, TERMS, OpCall, R, Strategy, alike, linear_in, with_one
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, with_local_size
from dure.tensor.rules.embedding import own_rows
from dure.tensor.rules.views import without

aten = torch.ops.aten


def _dim(call: OpCall) -> int:
    return call.arg("dim") % max(call.operands[0].ndim, 1)


def _gather_local(call: OpCall) -> Callable[..., Any] | None:
    """Gather what this rank has of a dimension that is cut, and zeros for the rest.

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
def _gather(call: OpCall) -> list[Strategy]:
    source, index = call.operands
    dim = _dim(call)
    found = with_one(call, TERMS)
    if not source.ndim or source.ndim != index.ndim:
        return found
    for d in range(index.ndim):
        if d == dim:
            found.append(Strategy((R, Shard(d)), (Shard(d),)))
            if index.shape[d] == 1 and source.meta.dtype != torch.bool:
                found.append(Strategy((Shard(d), R), (SUM,)))
        elif source.shape[d] == index.shape[d]:
            found.append(Strategy((Shard(d), Shard(d)), (Shard(d),)))
    return found


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default, aten.scatter_reduce.two,
)  # fmt: skip
def _scatter(call: OpCall) -> list[Strategy]:
    specs = call.operands
    found: list[Strategy] = []
    if call.op in (aten.scatter.src, aten.scatter_add.default):
        found += [Strategy((term, R, term), (term,)) for term in linear_in(call)]
    if specs[0].ndim and len({spec.ndim for spec in specs}) == 1:
        for d in range(specs[0].ndim):
            if d != _dim(call) and len({spec.shape[d] for spec in specs}) == 1:
                found.append(Strategy((Shard(d),) * len(specs), (Shard(d),)))
    return found


@rule(aten.index_select.default)
def _index_select(call: OpCall) -> list[Strategy]:
    source, index = call.operands
    found = with_one(call, TERMS)
    if source.ndim:
        found += [
            Strategy((Shard(d), R), (Shard(d),)) for d in range(source.ndim) if d != _dim(call)
        ]
        if index.ndim:
            found.append(Strategy((R, Shard(0)), (Shard(_dim(call)),)))
    return found


@rule(
    aten.index_add.default, aten.index_copy.default, aten.index_reduce.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
)  # fmt: skip
def _index_written(call: OpCall) -> list[Strategy]:
    target = call.operands[0]
    filled = "index_fill" in call.name
    rest = call.operands[2:]
    found: list[Strategy] = []
    if call.op in (aten.index_add.default, aten.index_copy.default):
        found += [Strategy((term, R, term), (term,)) for term in linear_in(call)]
    for d in range(target.ndim):
        if d == _dim(call) or not (filled or rest[0].ndim == target.ndim):
            continue
        others = (R if filled else Shard(d),) * len(rest)
        found.append(Strategy((Shard(d), R, *others), (Shard(d),)))
    return found


# ---- several indices -----------------------------------------------------------------------------


def _indexed(call: OpCall) -> tuple[list[int], int, int] | None:
    """Return the dimensions that are indexed, where the indices' own begin, and how many.

    None where an index is a mask, whose result's shape depends on its values.
    """
    indices = call.arg("indices")
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not given or any(i.meta.dtype in (torch.bool, torch.uint8) for _, i in given):
        return None
    dims = [d for d, _ in given]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, dims[0] if adjacent else 0, max(i.ndim for _, i in given)


def _there(d: int, dims: Sequence[int], begin: int, made: int) -> int:
    """Return where dimension d of the source, which is not indexed, is in the result."""
    before = sum(1 for one in dims if one < d)
    return d - before + (made if d - before >= begin else 0)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: OpCall) -> list[Strategy]:
    found_dims = _indexed(call)
    if found_dims is None:
        return []
    dims, begin, made = found_dims
    source, *indices = call.operands
    whole = (R,) * len(indices)
    found = with_one(call, TERMS)
    for d in range(source.ndim):
        if d not in dims:
            there = Shard(_there(d, dims, begin, made))
            found.append(Strategy((Shard(d), *whole), (there,)))
    for d in range(made):
        inputs: list[Placement] = []
        for index in indices:
            own = d - (made - index.ndim)
            cut = own >= 0 and index.shape[own] == call.output.shape[begin + d]
            inputs.append(Shard(own) if cut else R)
        found.append(Strategy((R, *inputs), (Shard(begin + d),)))
    return found


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: OpCall) -> list[Strategy]:
    found_dims = _indexed(call)
    if found_dims is None:
        return []
    dims, begin, made = found_dims
    target, *indices, values = call.operands
    whole = (R,) * len(indices)
    found = [Strategy((term, *whole, term), (term,)) for term in linear_in(call)]
    result_ndim = target.ndim - len(dims) + made
    for d in range(target.ndim):
        if d in dims:
            continue
        own = _there(d, dims, begin, made) - (result_ndim - values.ndim)
        cut = own >= 0 and values.shape[own] == target.shape[d]
        found.append(Strategy((Shard(d), *whole, Shard(own) if cut else R), (Shard(d),)))
    return found


# ---- inverses of views ---------------------------------------------------------------------------


def _put_back(call: OpCall, to: Sequence[int | None]) -> list[Strategy]:
    """Return strategies of an operator that puts its last operand's values into its first.

    `to` has for each dimension of the result where it is in the values, None if it is not.
    """
    found: list[Strategy] = []
    first = len(call.operands) > 1
    for d, there in enumerate(to):
        if there is not None:
            inputs = (Shard(d), Shard(there)) if first else (Shard(there),)
            found.append(Strategy(inputs, (Shard(d),)))
    return found + alike(call, LINEAR)


@rule(aten.select_backward.default, local=with_local_size)
@rule(aten.select_scatter.default)
def _selected(call: OpCall) -> list[Strategy]:
    return _put_back(call, without(len(call.output.shape), [call.arg("dim")]))


@rule(aten.diagonal_backward.default, local=with_local_size)
@rule(aten.diagonal_scatter.default)
def _diagonal(call: OpCall) -> list[Strategy]:
    gone = call.arg("dim1"), call.arg("dim2")
    return _put_back(call, without(len(call.output.shape), gone))


@rule(aten.slice_backward.default, aten.unfold_backward.default, local=with_local_size)
@rule(aten.slice_scatter.default)
def _sliced(call: OpCall) -> list[Strategy]:
    ndim = len(call.output.shape)
    dim = call.arg("dim") % max(ndim, 1)
    return _put_back(call, [None if d == dim else d for d in range(ndim)])
