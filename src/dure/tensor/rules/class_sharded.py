"""Softmax and negative log likelihood of scores whose classes are divided over the ranks.

A vocabulary of scores is the largest activation of a language model. Where it is sharded over the
classes, nothing of it is gathered: the ranks exchange the highest score and the sum of exponentials
of each sample, and of its target's score, which one rank has, a term each.

Source: loss parallelism as in Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from dure.comm.ops import ReduceOp
from dure.tensor.call import OpCall
from dure.tensor.placement_types import Partial, Replicate
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import DTensorSpec

__all__ = [
    "logsumexp_of_classes",
    "nll_backward_of_classes",
    "nll_of_classes",
    "softmax_of_classes",
]

aten = torch.ops.aten
MEAN, TOTAL = 1, 2
"""What an argument `reduction` may be, besides none."""


def _reduce(tensor: torch.Tensor, spec: DTensorSpec, dim: int, op: ReduceOp) -> torch.Tensor:
    """Reduce a tensor in place over the ranks among whom a dimension is divided."""
    for cut in spec.cuts(dim):
        spec.mesh.get_group(cut.axis).all_reduce(tensor, op)
    return tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def softmax_of_classes(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Return what runs in the place of a (log-)softmax, or its backward; None if it runs itself."""
    spec, result = operands[0], results[0]
    assert result is not None
    dim = call.arg("dim") % max(spec.ndim, 1)
    if spec.ndim == 0 or not spec.cuts(dim):
        return None
    dtype, logarithm = result.meta.dtype, "log_softmax" in call.name

    def forward(values: torch.Tensor, *_: Any) -> torch.Tensor:
        values = _wide(values)
        if values.shape[dim]:
            highest = values.amax(dim, keepdim=True)
        else:
            highest = values.new_full([*values.shape[:dim], 1, *values.shape[dim + 1 :]], -math.inf)
        shifted = values - _reduce(highest, spec, dim, ReduceOp.MAX)
        total = _reduce(shifted.exp().sum(dim, keepdim=True), spec, dim, ReduceOp.SUM)
        return (shifted - total.log() if logarithm else shifted.exp() / total).to(dtype)

    def backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        grad, output = _wide(grad), _wide(output)
        terms = grad if logarithm else grad * output
        total = _reduce(terms.sum(dim, keepdim=True), spec, dim, ReduceOp.SUM)
        found = grad - output.exp() * total if logarithm else output * (grad - total)
        return found.to(dtype)

    return backward if "backward" in call.name else forward


def logsumexp_of_classes(
    spec: DTensorSpec, dims: Set[int], result: DTensorSpec | None
) -> Callable[..., Any] | None:
    """Return what runs in the place of logsumexp; None if it runs itself."""
    assert result is not None
    axes = [cut.axis for dim in dims for cut in spec.cuts(dim)]
    if not axes:
        return None
    dtype = result.meta.dtype

    def forward(values: torch.Tensor, _: Any, keepdim: bool = False) -> torch.Tensor:
        values, reduced = _wide(values), tuple(dims)
        shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
        empty = not all(values.shape[dim] for dim in dims)
        highest = values.new_full(shape, -math.inf) if empty else values.amax(reduced, keepdim=True)
        for axis in axes:
            spec.mesh.get_group(axis).all_reduce(highest, ReduceOp.MAX)
        highest = torch.where(highest.isinf(), 0, highest)
        total = (values - highest).exp().sum(reduced, keepdim=True)
        for axis in axes:
            spec.mesh.get_group(axis).all_reduce(total, ReduceOp.SUM)
        found = (total.log() + highest).to(dtype)
        return found if keepdim else found.squeeze(reduced)

    return forward


def _own(
    target: torch.Tensor, spec: DTensorSpec, dim: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets this rank has, and their numbers among its classes, 0 for others."""
    size, first = spec.runs(dim)[0]
    own = (target >= first) & (target < first + size) & (target != ignored)
    return own, torch.where(own, target - first, 0)


def _check_targets(target: torch.Tensor, classes: int, ignored: int) -> None:
    """Raise as the operator itself does if a target is no class."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if not target.is_cuda and wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")


def _weights(
    target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return what each target counts."""
    counts = target != ignored
    if weight is None:
        return counts.to(dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0)


def nll_of_classes(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Return what runs in the place of nll_loss; None if the classes are on one rank."""
    spec, total = operands[0], results[1]
    assert total is not None
    dim = 1 if spec.ndim > 1 else 0
    if not spec.cuts(dim):
        return None
    axes = {cut.axis for cut in spec.cuts(dim)}
    batch = [p.is_shard() and axis not in axes for axis, p in enumerate(spec.placements)]
    whole = total.with_placements([Replicate()] * len(batch))
    terms = total.with_placements([Partial() if cut else Replicate() for cut in batch])

    def forward(
        values: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check_targets(target, spec.shape[dim], ignored)
        own, index = _own(target, spec, dim, ignored)
        counted = _weights(target, weight, ignored, values.dtype)
        if values.shape[dim]:
            scores = values.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        else:
            scores = counted
        loss = torch.where(own, -scores * counted, 0)
        if reduction not in (MEAN, TOTAL):
            return loss, values.new_zeros(())
        if reduction == MEAN:
            counts = redistribute(counted.sum(), terms, whole)
            return loss.sum() / counts, counts
        return loss.sum(), counted.sum()

    return forward


def nll_backward_of_classes(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Return what runs in the place of nll_loss's backward; None if it runs itself."""
    spec = operands[1]
    dim = 1 if spec.ndim > 1 else 0
    if not spec.cuts(dim):
        return None

    def backward(
        grad: torch.Tensor,
        values: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
        total: torch.Tensor,
    ) -> torch.Tensor:
        own, index = _own(target, spec, dim, ignored)
        counted = _weights(target, weight, ignored, values.dtype)
        scale = grad / total if reduction == MEAN else grad
        found = torch.zeros_like(values)
        if values.shape[dim]:
            source = torch.where(own, -counted * scale, 0).to(values.dtype)
            found.scatter_(dim, index.unsqueeze(dim), source.unsqueeze(dim))
        return found

    return backward
