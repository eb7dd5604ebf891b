"""Softmax and losses.

All dimensions of a softmax may be sharded, also the normalized one. The scores over the vocabulary
are the largest activation of a language model: if they are sharded over the classes, they are not
gathered. The ranks all-reduce the highest score and the sum of exponentials of each sample, and the
loss of each sample, which the rank with its target has computed. So all ranks along that axis have
the loss, as with torch's `loss_parallel`. The gradient of a softmax is linear.

A loss that is summed or averaged over a sharded batch is Partial. An average is divided by the
number of elements of the complete batch: by the shape or, with weights and ignored targets, by the
sum of the weights over all ranks.

Source: loss parallelism as in Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dure.comm.ops import ReduceOp
from dure.tensor.call import SUM, AxisStrategy, OpCall, R, same_placement, schema_of, with_one
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.redistribute import all_reduce_of, redistribute
from dure.tensor.registry import rule, zeros_where_empty
from dure.tensor.rules.embedding import own_rows
from dure.tensor.rules.pointwise import aligned_cuts, pointwise
from dure.tensor.rules.reductions import reduced_dims, reduction, weighed
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten
NONE, MEAN, TOTAL = 0, 1, 2
"""Values of the argument `reduction`."""


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


Reduce = Callable[[torch.Tensor, ReduceOp], torch.Tensor]


def _over_ranks(spec: DTensorSpec, dims: Collection[int]) -> Reduce:
    """Return a function that all-reduces a tensor in place along the axes that cut dimensions."""
    axes = [cut.axis for dim in dims for cut in spec.cuts(dim)]

    def reduce(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        all_reduce_of(spec, axes, tensor, op)
        return tensor

    return reduce


def _highest(values: torch.Tensor, dims: Collection[int], reduce: Reduce) -> torch.Tensor:
    """Return the maximum over dimensions, which are kept, and over all ranks."""
    if all(values.shape[dim] for dim in dims):
        found = values.amax(tuple(dims), keepdim=True)
    else:
        shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
        found = values.new_full(shape, -math.inf)
    return reduce(found, ReduceOp.MAX)


def _softmax_local(call: OpCall) -> Callable[..., Any] | None:
    """Normalize over the classes of all ranks, if they are sharded."""
    spec = call.operands[0]
    dim = call.arg("dim") % max(spec.ndim, 1)
    if spec.ndim == 0 or not spec.cuts(dim):
        return None
    dtype, logarithm = call.result.meta.dtype, "log_softmax" in call.name
    reduce = _over_ranks(spec, [dim])

    def forward(values: torch.Tensor, *_: Any) -> torch.Tensor:
        values = _wide(values)
        shifted = values - _highest(values, [dim], reduce)
        total = reduce(shifted.exp().sum(dim, keepdim=True), ReduceOp.SUM)
        return (shifted - total.log() if logarithm else shifted.exp() / total).to(dtype)

    def backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        grad, output = _wide(grad), _wide(output)
        terms = grad if logarithm else grad * output
        total = reduce(terms.sum(dim, keepdim=True), ReduceOp.SUM)
        found = grad - output.exp() * total if logarithm else output * (grad - total)
        return found.to(dtype)

    return backward if "backward" in call.name else forward


@rule(
    aten._softmax.default, aten._log_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    local=_softmax_local,
)  # fmt: skip
def _softmax(call: OpCall) -> list[AxisStrategy]:
    found = same_placement(call, map(Shard, range(call.operands[0].ndim)))
    return found + (with_one(call) if "backward" in call.name else [])


def _logsumexp_local(call: OpCall) -> Callable[..., Any] | None:
    """Sum the exponentials of all ranks, if a reduced dimension is sharded."""
    spec, dims, dtype = call.operands[0], reduced_dims(call), call.result.meta.dtype
    if not any(spec.cuts(dim) for dim in dims):
        return zeros_where_empty(call)
    reduce = _over_ranks(spec, dims)

    def forward(values: torch.Tensor, _: Any, keepdim: bool = False) -> torch.Tensor:
        values, reduced = _wide(values), tuple(dims)
        highest = _highest(values, dims, reduce)
        highest = torch.where(highest.isinf(), 0, highest)
        total = (values - highest).exp().sum(reduced, keepdim=True)
        found = (reduce(total, ReduceOp.SUM).log() + highest).to(dtype)
        return found if keepdim else found.squeeze(reduced)

    return forward


@rule(aten.logsumexp.default, local=_logsumexp_local)
def _logsumexp(call: OpCall) -> list[AxisStrategy]:
    spec, dims = call.operands[0], reduced_dims(call)
    cuts = [] if spec.meta.dtype.is_complex else map(Shard, dims)
    return reduction(call, None) + [AxisStrategy((cut,), (R,)) for cut in cuts]


# ---- losses that are pointwise before they are reduced -------------------------------------------


def _sizes(specs: Sequence[DTensorSpec]) -> tuple[int, int]:
    """Return the number of elements after broadcasting, of this rank's parts and in total."""
    local, full = zip(*((spec.local_shape, spec.shape) for spec in specs), strict=True)
    return torch.broadcast_shapes(*local).numel(), torch.broadcast_shapes(*full).numel()


def _pointwise_loss_local(call: OpCall) -> Callable[..., Any] | None:
    return weighed(call, *_sizes(call.operands)) if call.arg("reduction") == MEAN else None


@rule(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
    local=_pointwise_loss_local,
)  # fmt: skip
def _pointwise_loss(call: OpCall) -> list[AxisStrategy]:
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands))
    reduced = call.arg("reduction") != NONE
    cuts = aligned_cuts(call, shape)
    return [AxisStrategy(inputs, (SUM if reduced else cut,)) for cut, inputs in cuts]


def _pointwise_loss_backward_local(call: OpCall) -> Callable[..., Any] | None:
    """Divide by the total number of elements instead of the number of this rank's elements."""
    mine, total = _sizes(call.operands[1:])
    if call.arg("reduction") != MEAN or mine == total:
        return None
    op = call.op
    place = schema_of(op).names.index("reduction")

    def backward(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        filled = [grad / total, *args]
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
def _pointwise_loss_backward(call: OpCall) -> list[AxisStrategy]:
    return pointwise(call) + with_one(call)


# ---- negative log likelihood ---------------------------------------------------------------------


def _batches(scores: DTensorSpec) -> list[tuple[Placement, Placement]]:
    """Return placements that cut scores [N, C, ...] and targets [N, ...] in the same way."""
    if scores.ndim < 2:
        return []
    pairs: list[tuple[Placement, Placement]] = [(Shard(0), Shard(0))]
    return pairs + [(Shard(dim), Shard(dim - 1)) for dim in range(2, scores.ndim)]


def _classes(scores: DTensorSpec) -> int:
    """Return the dimension of the classes."""
    return 1 if scores.ndim > 1 else 0


def _check_targets(target: torch.Tensor, classes: int, ignored: int) -> None:
    """Raise as the operator itself does if a target is out of range."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if not target.is_cuda and wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")


def _weights(
    target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight of each target."""
    counts = target != ignored
    if weight is None:
        return counts.to(dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0)


def _nll_of_divided(scores: DTensorSpec) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return nll_loss for sharded classes: a function that returns the loss and the total weight.

    The rank with a sample's target computes its loss, other ranks 0; these are all-reduced.
    """
    dim = _classes(scores)
    run = scores.runs(dim)[0]
    reduce = _over_ranks(scores, [dim])

    def sums(
        values: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check_targets(target, scores.shape[dim], ignored)
        index, missing = own_rows(target, run)
        counted = _weights(target, weight, ignored, values.dtype)
        if values.shape[dim]:
            given = values.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        else:
            given = counted
        loss = (-given * counted).masked_fill_(missing | (target == ignored), 0)
        if reduction == NONE:
            return reduce(loss.contiguous(), ReduceOp.SUM), values.new_zeros(())
        total = reduce(_wide(loss).sum(), ReduceOp.SUM)
        return total.to(loss.dtype), counted.sum()

    return sums


def _nll_local(call: OpCall) -> Callable[..., Any] | None:
    """Divide by the weights of all targets, summed over the ranks."""
    scores, dim = call.operands[0], _classes(call.operands[0])
    divided = bool(scores.cuts(dim))
    sums = _nll_of_divided(scores) if divided else call.op
    batch = [SUM if p.is_shard() and not p.is_shard(dim) else R for p in scores.placements]
    if call.arg("reduction") != MEAN or not (divided or SUM in batch):
        return sums if divided else None
    total = call.results[1]
    assert total is not None
    terms, replicated = total.with_placements(batch), total.replicated()

    def mean(
        values: torch.Tensor, target: torch.Tensor, weight: Any, _: int, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, own = sums(values, target, weight, TOTAL, ignored)
        weights = redistribute(own, terms, replicated)
        return loss / weights, weights

    return mean


@rule(
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    local=_nll_local, contiguous=True,
)  # fmt: skip
def _nll(call: OpCall) -> list[AxisStrategy]:
    weights = (R,) * (len(call.operands) - 2)
    reduction = call.arg("reduction")
    found: list[AxisStrategy] = []
    for scores, targets in _batches(call.operands[0]):
        loss = targets if reduction == NONE else SUM
        total = R if reduction == MEAN else SUM
        found.append(AxisStrategy((scores, targets, *weights), (loss, total)))
    classes = Shard(_classes(call.operands[0]))
    return [*found, AxisStrategy((classes, R, *weights), (R, R))]


def _nll_backward_local(call: OpCall) -> Callable[..., Any] | None:
    """Return the gradient of this rank's classes, if they are sharded."""
    spec = call.operands[1]
    dim = _classes(spec)
    if not spec.cuts(dim):
        return None
    run = spec.runs(dim)[0]

    def backward(
        grad: torch.Tensor,
        values: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
        total: torch.Tensor,
    ) -> torch.Tensor:
        index, missing = own_rows(target, run)
        counted = _weights(target, weight, ignored, values.dtype)
        scale = grad / total if reduction == MEAN else grad
        found = torch.zeros_like(values)
        if values.shape[dim]:
            nothing = missing | (target == ignored)
            source = (-counted * scale).masked_fill_(nothing, 0).to(values.dtype)
            found.scatter_(dim, index.unsqueeze(dim), source.unsqueeze(dim))
        return found

    return backward


@rule(
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
    local=_nll_backward_local, contiguous=True,
)  # fmt: skip
def _nll_backward(call: OpCall) -> list[AxisStrategy]:
    rest = (R,) * (len(call.operands) - 3)
    found: list[AxisStrategy] = []
    for scores, targets in _batches(call.operands[1]):
        grad = targets if call.operands[0].ndim else R
        found.append(AxisStrategy((grad, scores, targets, *rest), (scores,)))
    classes = Shard(_classes(call.operands[1]))
    found.append(AxisStrategy((R, classes, R, *rest), (classes,)))
    return found + with_one(call)
