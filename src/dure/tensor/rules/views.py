"""Views: results with the elements of the operand in other dimensions.

A view maps groups of dimensions: each run of consecutive dimensions of the operand becomes a run of
the result with the same number of elements. If a group maps one dimension to one, it keeps its
cuts. If dimensions are flattened or split, a cut is kept if a placement of the result describes the
parts: a cut of the outermost dimension of a group, if it divides evenly, as `Shard`, and a cut of
an inner one as `StridedShard`. Other cuts are gathered first. Every view keeps Partial placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dure import torch_private
from dure.errors import PlacementError
from dure.tensor.call import TERMS, AxisStrategy, Op, OpCall, R, direct, same_placement
from dure.tensor.dispatch import dispatch, special
from dure.tensor.placement_types import Placement, Shard, StridedShard
from dure.tensor.redistribute import redistribute
from dure.tensor.registry import is_alias, rule, view_or_copy, with_local_size
from dure.tensor.spec import Cut, TensorMeta, cuts_of, spec_of
from dure.tensor.strides import is_dense
from dure.tensor.wrapping import wrap

__all__ = ["groups_of", "without"]

aten = torch.ops.aten


def _moved_dims(call: OpCall, to: Sequence[int | None]) -> list[AxisStrategy]:
    """Return strategies of a view that moves dimension d of the operand to `to[d]`."""
    count = len(call.outputs)
    strided = [p for p in call.operands[0].placements if isinstance(p, StridedShard)]
    cuts = [*map(Shard, range(len(to))), *dict.fromkeys(strided)]
    found: list[AxisStrategy] = []
    for cut in cuts:
        there = to[cut.dim]
        if there is not None:
            found.append(AxisStrategy((cut,), (replace(cut, dim=there),) * count))
    return found + same_placement(call, TERMS)


@rule(
    aten.detach.default, aten.alias.default, aten.lift_fresh.default,
)  # fmt: skip
def _same_dims(call: OpCall) -> list[AxisStrategy]:
    return _moved_dims(call, range(call.operands[0].ndim))


@special(aten._conj.default, aten._neg_view.default)
def _marked(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute conjugates and negatives that torch would only mark: no part has such a mark."""
    (tensor,) = args
    result = dispatch(
        aten.neg.default if op is aten._neg_view.default else aten.conj_physical.default,
        args,
        kwargs,
    )
    result.copied_at = tensor._version
    return result


_IN_PLACE_VIEWS: dict[Op, Op] = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""Operators that make a tensor a view of itself, and those that return such a view."""


@special(torch.Tag.inplace_view)
def _view_in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor a view of itself: its part, its spec, and the shape that torch sees."""
    tensor = args[0]
    if op is aten.detach_.default:
        return tensor
    view = dispatch(_IN_PLACE_VIEWS[op], args, kwargs) if op in _IN_PLACE_VIEWS else None
    if view is None or view.copied_at is not None:
        raise PlacementError(
            f"{op} would have to redistribute or reshape the tensor in place",
            op=str(op),
            seen=str(tensor.spec),
            fix="Use the operator that returns a new tensor, or redistribute() first.",
        )
    with torch_private.ExcludeDispatchKeyGuard(_PYTHON_KEYS):
        op(*args, **kwargs)
    tensor.part, tensor.spec = view.part, view.spec
    return tensor


_PYTHON_KEYS = torch_private.DispatchKeySet(
    torch_private.DispatchKey.Python
) | torch_private.DispatchKeySet(torch_private.DispatchKey.PythonTLSSnapshot)
"""The dispatch keys by which operators on DTensors reach `dispatch`."""


@special(aten.as_strided.default)
def _of_memory(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `as_strided` on a replicated part, or on a gathered copy.

    A gathered copy of a view does not contain the memory around the view.
    """
    tensor, spec = args[0], args[0].spec
    replicated = spec.replicated()
    if spec.coordinate is None:
        made = op(spec.meta.empty(), *args[1:], **kwargs)
        outside = spec_of(spec.mesh, replicated.placements, TensorMeta.of(made))
        return wrap(outside.part_outside(), outside)
    part, moved = redistribute(tensor.part, spec, replicated), not spec.is_replicated()
    if part.stride() != spec.meta.stride and is_dense(spec.meta.empty()):
        copy = torch.empty_strided(
            spec.shape, spec.meta.stride, dtype=part.dtype, device=part.device
        )
        part, moved = copy.copy_(part), True
    beside = moved and tensor._is_view() and (*args[3:], *kwargs.values()) not in ((), (None,))
    if beside or part.stride() != spec.meta.stride:
        raise PlacementError(
            "as_strided is not possible: the parts do not have the strides of the full tensor",
            op=str(op),
            seen=str(spec),
            fix="Call contiguous() or clone(), or redistribute() it to Replicate() first.",
        )
    made = op(part, *args[1:], **kwargs)
    result = wrap(made, spec_of(spec.mesh, replicated.placements, TensorMeta.of(made)))
    result.copied_at = tensor._version if moved else tensor.copied_at
    return result


def _other_dtype_local(call: OpCall) -> Callable[..., Any]:
    return partial(view_or_copy, call.op, call.operands[0])


@rule(
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default,
    local=_other_dtype_local,
)  # fmt: skip
def _other_dtype(call: OpCall) -> list[AxisStrategy]:
    """Views of another dtype change the last dimension; Partial is kept for complex views only."""
    spec, result = call.operands[0], call.output
    bits = call.op is aten.view.dtype
    same = bits and spec.meta.dtype.itemsize == result.dtype.itemsize
    shared = min(spec.ndim, len(result.shape)) - (bits and not same)
    found = [AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in range(shared)]
    return found + [AxisStrategy((term,), (term,)) for term in TERMS[:2] if not bits]


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def _permuted(call: OpCall) -> list[AxisStrategy]:
    ndim = call.operands[0].ndim
    order = list(range(ndim))
    if call.op is aten.permute.default:
        order = [dim % ndim for dim in call.arg("dims")]
    elif ndim > 1:
        a, b = (call.arg("dim0"), call.arg("dim1")) if call.op is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]
    return _moved_dims(call, [order.index(dim) for dim in range(ndim)])


@rule(aten.unsqueeze.default)
def _unsqueezed(call: OpCall) -> list[AxisStrategy]:
    ndim = call.operands[0].ndim
    new = call.arg("dim") % (ndim + 1)
    return _moved_dims(call, [dim + (dim >= new) for dim in range(ndim)])


def without(ndim: int, gone: Iterable[int]) -> list[int | None]:
    """Return the position of each dimension after some were removed; None for those."""
    lost = {dim % max(ndim, 1) for dim in gone}
    return [None if d in lost else d - sum(g < d for g in lost) for d in range(ndim)]


def _squeezed_dims(call: OpCall) -> list[int]:
    """Return the dimensions that are removed: those of one element in the full tensor."""
    shape = call.operands[0].shape
    dims = range(len(shape)) if call.op is aten.squeeze.default else call.arg("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return [dim for dim in dims if shape and shape[dim] == 1]


def _squeezed_local(call: OpCall) -> Callable[..., Any]:
    dims = _squeezed_dims(call)
    return lambda tensor, *args, **kwargs: aten.squeeze.dims(tensor, dims)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, local=_squeezed_local)
def _squeezed(call: OpCall) -> list[AxisStrategy]:
    return _moved_dims(call, without(call.operands[0].ndim, _squeezed_dims(call)))


@rule(aten.expand.default, local=with_local_size)
def _expanded(call: OpCall) -> list[AxisStrategy]:
    shape, made = call.operands[0].shape, call.output.shape
    added = len(made) - len(shape)
    kept = [size == made[dim + added] for dim, size in enumerate(shape)]
    return _moved_dims(call, [d + added if keep else None for d, keep in enumerate(kept)])


# ---- parts ---------------------------------------------------------------------------------------


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unfold.default, aten.slice.Tensor)
def _parts(call: OpCall) -> list[AxisStrategy]:
    shape = call.operands[0].shape
    dim = call.arg("dimension" if call.op is aten.unfold.default else "dim") % max(len(shape), 1)
    everything = False
    if call.op is aten.slice.Tensor:
        size, start, end = shape[dim], call.arg("start") or 0, call.arg("end")
        everything = start in (0, -size) and (end is None or end >= size) and call.arg("step") == 1
    return _moved_dims(call, [d if d != dim or everything else None for d in range(len(shape))])


@rule(aten.select.int, aten.unbind.int)
def _selected(call: OpCall) -> list[AxisStrategy]:
    return _moved_dims(call, without(call.operands[0].ndim, [call.arg("dim")]))


@rule(aten.diagonal.default)
def _diagonal(call: OpCall) -> list[AxisStrategy]:
    gone = call.arg("dim1"), call.arg("dim2")
    return _moved_dims(call, without(call.operands[0].ndim, gone))


# ---- flattening and splitting --------------------------------------------------------------------


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the groups of a reshape: runs of dimensions of equal size in both shapes."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [i] if i < len(before) else [], [j] if j < len(after) else []
        a = before[i] if left else 1
        b = after[j] if right else 1
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                left.append(i)
                a *= before[i]
                i += 1
            else:
                right.append(j)
                b *= after[j]
                j += 1
        groups.append((left, right))
    return groups


Digit = tuple[int, int | None]
"""A size, and the mesh axis that is cut by it; None if each rank has all of its values."""


def _reshaped_local(call: OpCall) -> Callable[..., Any]:
    """Return a view of the part if the reshape of the full tensor is a view, else a copy."""
    spec, shape, view = call.operands[0], call.result.local_shape, direct(aten.view.default)
    if call.op is aten._unsafe_view.default:  # its operand is used nowhere else
        return lambda tensor, size: tensor.reshape(shape)
    full = spec.meta.empty()
    if call.op is aten.view.default or is_alias(full.reshape(call.output.shape), full):

        def viewed(tensor: torch.Tensor, size: object) -> torch.Tensor:
            try:  # saves the call of view_or_copy
                return view(tensor, shape)
            except RuntimeError:
                return view_or_copy(view, spec, tensor, shape)

        return viewed

    def copy(tensor: torch.Tensor, size: object) -> torch.Tensor:
        made = tensor.reshape(shape)
        return made.clone() if is_alias(made, tensor) else made

    return copy


@rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    local=_reshaped_local, all_axes=True,
)  # fmt: skip
def _reshaped(call: OpCall) -> list[AxisStrategy]:
    """Keep all cuts if possible; otherwise keep the cuts of each axis in turn, if possible."""
    spec, result = call.operands[0], call.output
    before, after, sizes = spec.shape, result.shape, spec.mesh.shape
    if 0 in before:
        keep = tuple(p if p.is_partial() else R for p in spec.placements)
        return [AxisStrategy((keep,), (keep,))]
    there = _through(spec.placements, before, after, sizes)
    if there is not None:
        return [AxisStrategy((spec.placements,), (there,))]
    given: list[Placement] = [R if p.is_shard() else p for p in spec.placements]
    there = tuple(given)
    for axis, placement in enumerate(spec.placements):
        trial = [*given[:axis], placement, *given[axis + 1 :]]
        found = _through(trial, before, after, sizes)
        if found is not None:
            given, there = trial, found
    return [AxisStrategy((tuple(given),), (there,))]


def _through(
    placements: Sequence[Placement],
    before: Sequence[int],
    after: Sequence[int],
    sizes: Sequence[int],
) -> tuple[Placement, ...] | None:
    """Return the placements of a reshape's result; None if a cut cannot be kept.

    Cuts that divide evenly split the index of a dimension into digits, outermost first; one of the
    digits is the coordinate along the axis. A reshape concatenates the digits of a group of
    dimensions and distributes them to the new dimensions. At the end it is checked that the
    placements found for the result give the same digits.
    """
    found = [R if p.is_shard() else p for p in placements]
    wanted: list[tuple[int, list[Digit]]] = []
    for dims, made in groups_of(before, after):
        axes = [a for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim in dims]
        if not axes:
            continue
        long = [d for d in dims if before[d] > 1], [d for d in made if after[d] > 1]
        if len(dims) == len(made) == 1:  # of any size, 1 as well
            long = dims, made
        if len(long[0]) == len(long[1]) == 1 and all(
            placements[a].is_shard(long[0][0]) for a in axes
        ):
            for axis in axes:
                found[axis] = replace(placements[axis], dim=long[1][0])
            continue
        digits: list[Digit] = []
        for dim in dims:
            own = _digits(before[dim], cuts_of(placements, sizes, dim), sizes)
            if own is None:
                return None
            digits += own
        for dim in made:
            taken = _taken(digits, after[dim])
            if taken is None:
                return None
            wanted.append((dim, taken))
            for place, (_, axis) in enumerate(taken):
                if axis is not None:
                    earlier = taken[:place]
                    runs = math.prod(n for n, other in earlier if other is None or other > axis)
                    found[axis] = Shard(dim) if runs == 1 else StridedShard(dim, split_factor=runs)
    for dim, taken in wanted:
        if _digits(after[dim], cuts_of(found, sizes, dim), sizes) != _merged(taken):
            return None
    return tuple(found)


def _digits(size: int, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Digit] | None:
    """Return the digits into which cuts split an index; None if they do not divide evenly."""
    digits: list[Digit] = [(size, None)] if size > 1 else []
    for cut in cuts:
        place, runs, n = 0, cut.runs, sizes[cut.axis]
        while place < len(digits) and (digits[place][1] is not None or runs > 1):
            length, axis = digits[place]
            if axis is None:
                inner = length // runs
                if runs % length == 0:
                    runs //= length
                elif length % runs == 0:
                    digits[place : place + 1] = [(runs, None), (inner, None)]
                    runs = 1
                else:
                    return None
            place += 1
        if place == len(digits) or runs > 1 or digits[place][0] % n:
            return None
        digits[place : place + 1] = [(n, cut.axis), (digits[place][0] // n, None)]
        digits = [(length, axis) for length, axis in digits if length > 1 or axis is not None]
    return _merged(digits)


def _taken(digits: list[Digit], size: int) -> list[Digit] | None:
    """Take digits from the front that make a size; None if a coordinate would be divided."""
    taken: list[Digit] = []
    while size > 1:
        length, axis = digits.pop(0)
        if axis is None and length > size and length % size == 0:
            digits.insert(0, (length // size, None))
            length = size
        if size % length:
            return None
        taken.append((length, axis))
        size //= length
    return taken


def _merged(digits: Sequence[Digit]) -> list[Digit]:
    """Return the digits, with neighbors that no axis cuts multiplied."""
    merged: list[Digit] = []
    for length, axis in digits:
        if merged and axis is None and merged[-1][1] is None:
            merged[-1] = merged[-1][0] * length, None
        else:
            merged.append((length, axis))
    return merged
