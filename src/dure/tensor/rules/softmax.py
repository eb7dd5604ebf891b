"""Softmax and losses.

The dimension of a softmax may be sharded as the others may (class_sharded.py); its gradient is
linear.

A loss that is summed or averaged over a sharded batch is terms of a sum. What an average divides by
is counted over the whole batch: by the shape, or, where weights and ignored targets count, by a
sum over the ranks, which the operator makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.tensor.call import OpCall, Strategy, schema_of
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.redistribute import redistribute
from dure.tensor.registry import rule
from dure.tensor.rules.class_sharded import (
    logsumexp_of_classes,
    nll_backward_of_classes,
    nll_of_classes,
    softmax_of_classes,
)
from dure.tensor.rules.pointwise import aligned
from dure.tensor.rules.reductions import reduced_dims, reduction, zeros_where_empty
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten
R = Replicate()
SUM = Partial("sum")
LINEAR = (SUM, Partial("avg"))
NONE, MEAN, TOTAL = 0, 1, 2
"""What an argument `reduction` may be."""


def _other_dims(call: OpCall) -> list[Strategy]:
    spec = call.operands[0]
    dim = call.arg("dim") % max(spec.ndim, 1)
    cuts = [Shard(d) for d in range(spec.ndim) if d != dim]
    return [Strategy((cut,) * len(call.operands), (cut,)) for cut in cuts]


@rule(aten._safe_softmax.default)
def _safe_softmax(call: OpCall) -> list[Strategy]:
    return _other_dims(call)


@rule(aten._softmax.default, aten._log_softmax.default, local=softmax_of_classes)
def _softmax(call: OpCall) -> list[Strategy]:
    return [Strategy((cut,), (cut,)) for cut in map(Shard, range(call.operands[0].ndim))]


@rule(
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    local=softmax_of_classes,
)  # fmt: skip
def _softmax_backward(call: OpCall) -> list[Strategy]:
    cuts = map(Shard, range(call.operands[0].ndim))
    found = [Strategy((cut, cut), (cut,)) for cut in cuts]
    return found + [Strategy((term, R), (term,)) for term in LINEAR]


def _logsumexp_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    divided = logsumexp_of_classes(operands[0], reduced_dims(call), results[0])
    return divided or zeros_where_empty(call, operands, results)


@rule(aten.logsumexp.default, local=_logsumexp_local)
def _logsumexp(call: OpCall) -> list[Strategy]:
    spec, dims = call.operands[0], reduced_dims(call)
    cuts = [] if spec.meta.dtype.is_complex else map(Shard, dims)
    return reduction(call, None) + [Strategy((cut,), (R,)) for cut in cuts]


# ---- losses that are pointwise before they are reduced -------------------------------------------


def _broadcast(specs: Sequence[DTensorSpec]) -> torch.Size:
    return torch.broadcast_shapes(*(spec.shape for spec in specs))


def _pointwise_loss_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Weigh this rank's mean by its share of the elements."""
    if call.arg("reduction") != MEAN:
        return None
    whole = _broadcast(operands).numel()
    mine = torch.broadcast_shapes(*(spec.local_shape for spec in operands)).numel()
    if mine == whole:
        return None
    op, share = call.op, mine / whole
    if not mine:
        result = results[0]
        assert result is not None
        return lambda first, *args, **kwargs: first.new_zeros((), dtype=result.meta.dtype)
    return lambda *args, **kwargs: op(*args, **kwargs) * share


@rule(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
    local=_pointwise_loss_local,
)  # fmt: skip
def _pointwise_loss(call: OpCall) -> list[Strategy]:
    shape, reduced = _broadcast(call.operands), call.arg("reduction") != NONE
    found: list[Strategy] = []
    for dim in range(len(shape)):
        inputs = tuple(aligned(spec, shape, dim) for spec in call.operands)
        found.append(Strategy(inputs, (SUM if reduced else Shard(dim),)))
    return found


def _pointwise_loss_backward_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Divide by the number of all elements, not by that of this rank's."""
    if call.arg("reduction") != MEAN:
        return None
    whole, op = _broadcast(operands[1:]).numel(), call.op
    if torch.broadcast_shapes(*(spec.local_shape for spec in operands[1:])).numel() == whole:
        return None
    place = schema_of(op).names.index("reduction")

    def backward(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        filled = [grad / whole, *args]
        if place < len(filled):
            filled[place] = TOTAL
        else:
            kwargs = {**kwargs, "reduction": TOTAL}
        return op(*filled, **kwargs)

    return backward


@rule(
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default, aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
    local=_pointwise_loss_backward_local,
)  # fmt: skip
def _pointwise_loss_backward(call: OpCall) -> list[Strategy]:
    shape = _broadcast(call.operands[1:])
    found: list[Strategy] = []
    for dim in range(len(shape)):
        inputs = tuple(aligned(spec, shape, dim) for spec in call.operands)
        found.append(Strategy(inputs, (Shard(dim),)))
    rest = (R,) * (len(call.operands) - 1)
    return found + [Strategy((term, *rest), (term,)) for term in LINEAR]


# ---- negative log likelihood ---------------------------------------------------------------------


def _batches(call: OpCall, scores: DTensorSpec) -> list[tuple[Placement, Placement]]:
    """Return how scores [N, C, ...] and what has no classes, [N, ...], may be cut."""
    if scores.ndim < 2:
        return []
    pairs: list[tuple[Placement, Placement]] = [(Shard(0), Shard(0))]
    return pairs + [(Shard(dim), Shard(dim - 1)) for dim in range(2, scores.ndim)]


def _classes(scores: DTensorSpec) -> Shard:
    """Return how scores are cut whose classes are divided."""
    return Shard(1 if scores.ndim > 1 else 0)


def _nll_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Divide by the weight of all targets, which the ranks add up."""
    divided = nll_of_classes(call, operands, results)
    if divided is not None:
        return divided
    total = results[1]
    assert total is not None
    cut = [p.is_shard() for p in operands[0].placements]
    if call.arg("reduction") != MEAN or not any(cut):
        return None
    op, whole = call.op, total.with_placements([R] * len(cut))
    terms = whole.with_placements([SUM if is_cut else R for is_cut in cut])

    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, target, weight, _, ignored = args
        loss, own = op(values, target, weight, TOTAL, ignored)
        weights = redistribute(own, terms, whole)
        return loss / weights, weights

    return forward


@rule(
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    local=_nll_local, contiguous=True,
)  # fmt: skip
def _nll(call: OpCall) -> list[Strategy]:
    weights = (R,) * (len(call.operands) - 2)
    reduction = call.arg("reduction")
    found: list[Strategy] = []
    for scores, targets in _batches(call, call.operands[0]):
        loss = targets if reduction == NONE else SUM
        total = R if reduction == MEAN else SUM
        found.append(Strategy((scores, targets, *weights), (loss, total)))
    return [*found, Strategy((_classes(call.operands[0]), R, *weights), (SUM, R))]


@rule(
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
    local=nll_backward_of_classes, contiguous=True,
)  # fmt: skip
def _nll_backward(call: OpCall) -> list[Strategy]:
    rest = (R,) * (len(call.operands) - 3)
    found: list[Strategy] = []
    for scores, targets in _batches(call, call.operands[1]):
        grad = targets if call.operands[0].ndim else R
        found.append(Strategy((grad, scores, targets, *rest), (scores,)))
    classes = _classes(call.operands[1])
    found.append(Strategy((R, classes, R, *rest), (classes,)))
    others = (R,) * (len(call.operands) - 1)
    return found + [Strategy((term, *others), (term,)) for term in LINEAR]
