"""Shapes, strides and dtypes of an operator's results, found by running it on meta tensors.

That is the slowest step of the first call of a kind. It does not depend on placements, so it is
cached for all placements and meshes. `wrapped_results` wraps the results on the parts as DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure import torch_private
from dure.tensor.call import Op, OpCall, Place, argument_at, check_out, fill, outs_of, schema_of
from dure.tensor.spec import DTensorSpec, TensorMeta
from dure.tensor.wrapping import wrap
from dure.torch_private import pytree

if TYPE_CHECKING:
    from dure.tensor.planning import OperatorPlan

__all__ = ["forget_results", "leaves", "results_of", "wrapped_results"]

Results = tuple[TensorMeta | None, ...]
_MOST = 1 << 16
_FEW_ELEMENTS = 1 << 20
_aten = torch.ops.aten
_OF_SUGGESTED_FORMAT = {_aten.native_batch_norm.default, _aten.native_batch_norm_backward.default}
"""Operators whose first result is row-major, or channels-last if the input is.

On the meta device torch keeps any order that the input has.
"""
_LIKE_SUMS = {
    _aten.binary_cross_entropy.default,
    _aten.floor_divide.default,
    _aten.rsub.Tensor,
}
"""Pointwise operators of two tensors that do not have torch's tag for such operators."""
_UNLIKE_SUMS = {_aten.masked_fill.Scalar, _aten.masked_fill.Tensor}
"""Pointwise operators whose kernels return row-major results, as torch's formulas say."""
_SECOND_FIRST = {_aten.rsub.Tensor, _aten.threshold_backward.default}
"""Pointwise operators whose results are stored as a sum of the operands in the other order."""
_known: dict[Any, Results] = {}


def results_of(call: OpCall, key: Sequence[Any]) -> Results:
    """Return shape, strides and dtype of each result that is a tensor, None for others.

    Args:
        call: The call.
        key: The key of its plan (dispatch.py), in which specs represent DTensors.
    """
    cache_key = (torch.get_default_dtype(), _without_placements(tuple(key)))
    try:
        found = _known.get(cache_key)
    except TypeError:  # an argument has no hash, such as a symbolic size
        return _run(call)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[cache_key] = _run(call)
    return found


def forget_results() -> None:
    """Empty the cache, after the implementation of an operator has changed."""
    _known.clear()


def leaves(result: Any) -> list[Any]:
    """Return the results of an operator as a list, with None for results that are not tensors."""
    found = pytree.tree_leaves(result)
    return [one if isinstance(one, torch.Tensor) else None for one in found]


def _without_placements(key: Any) -> Any:
    if type(key) is DTensorSpec:
        return key.meta
    return tuple(map(_without_placements, key)) if type(key) is tuple else key


def _run(call: OpCall) -> Results:
    outs = outs_of(call)
    metas, found = _run_on(call, [spec.meta.empty() for spec in call.operands], outs)
    for number in outs:
        check_out(call, number, metas[number].shape)
    return tuple(None if t is None else TensorMeta.of(t) for t in _as_stored(call, metas, found))


def _as_stored(call: OpCall, metas: list[torch.Tensor], found: list[Any]) -> list[Any]:
    """Return results with the strides that torch's kernels give them.

    For some operators torch's formulas for meta tensors give other strides. The formula for a sum
    is right, and holds for nearly all pointwise operators of two tensors. Operands that the kernel
    casts, such as integers that are divided, are summed as they are cast.
    """
    if call.op is _aten.nll_loss2d_forward.default:
        return [t.contiguous() for t in found]
    if call.op in _OF_SUGGESTED_FORMAT and found[0] is not None:
        like = metas[call.operand("input") or 0]
        layout = torch_private.suggest_memory_format(like)
        return [torch.empty_like(like, memory_format=layout), *found[1:]]
    if _is_like_a_sum(call.op) and len(metas) == 2 and len(found) == 1:
        (made,) = found
        given = [t.to(made.dtype) if made.dtype.is_floating_point else t for t in metas]
        given = given[::-1] if call.op in _SECOND_FIRST else given
        first, second = (torch.empty_strided(t.shape, t.stride(), device="meta") for t in given)
        if made.shape == (total := first + second).shape:  # a loss may be reduced
            return [total.to(made.dtype)]
    return found


def _is_like_a_sum(op: Op) -> bool:
    pointwise = torch.Tag.pointwise in op.tags or op in _LIKE_SUMS
    return pointwise and op not in _UNLIKE_SUMS and not schema_of(op).mutated


def _run_on(
    call: OpCall, tensors: list[torch.Tensor], outs: Sequence[int]
) -> tuple[list[torch.Tensor], list[Any]]:
    """Run an operator on meta tensors; return them, and its results.

    Some of torch's formulas for the meta device fail if there are no elements although the kernels
    do not: `mse_loss_backward` divides by their number. So after an error the operator runs on
    zeros, if they are few. If that fails as well, it is the operator's own error, the same on all
    ranks.
    """
    try:
        return tensors, _results_on(call, tensors, outs, "meta")
    except Exception as error:
        draws = torch.Tag.nondeterministic_seeded in call.op.tags
        if draws or sum(t.numel() for t in tensors) > _FEW_ELEMENTS:
            raise
        zeros = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").zero_()
            for t in tensors
        ]
        try:
            return zeros, _results_on(call, zeros, outs, "cpu")
        except NotImplementedError:
            raise error from None


def _results_on(
    call: OpCall, tensors: list[torch.Tensor], outs: Sequence[int], device: str
) -> list[Any]:
    for number in outs:
        tensors[number] = tensors[number].new_empty(0)  # is resized to the result's shape
    args, kwargs = fill(call.args, call.kwargs, call.places, tensors)
    if "device" in kwargs:
        kwargs["device"] = device
    return leaves(call.op(*args, **kwargs))


def wrapped_results(
    plan: OperatorPlan, result: Any, sources: tuple[Any, Any], is_copy: bool = False
) -> Any:
    """Return the results as DTensors; for arguments that were written, the arguments themselves.

    Args:
        plan: The plan of the call.
        result: The operator's result on the parts.
        sources: The arguments, as (args, kwargs).
        is_copy: Whether a copy was made in the place of a view.
    """
    if len(plan.returns) == 1 and plan.returns[0] is not None:
        return argument_at(sources, plan.returns[0])
    version = None
    if plan.is_view:
        source = argument_at(sources, plan.places[0])
        if is_copy or any(plan.moves) or source.copied_at is not None:
            version = source._version
    return _wrap_each(result, iter(plan.outputs), iter(plan.returns), sources, version)


def _wrap_each(
    one: Any,
    specs: Iterator[DTensorSpec | None],
    returns: Iterator[Place | None],
    sources: tuple[Any, Any],
    version: int | None,
) -> Any:
    """Wrap a result, or each one in a list; a closure would be a cycle that keeps tensors alive."""
    if isinstance(one, (list, tuple)):
        made = [_wrap_each(inner, specs, returns, sources, version) for inner in one]
        return tuple(made) if type(one) is tuple else made
    spec, place = next(specs), next(returns, None)
    if spec is None or not isinstance(one, torch.Tensor):
        return one
    if place is not None:
        return argument_at(sources, place)
    made = wrap(one, spec)
    made.copied_at = version
    return made
