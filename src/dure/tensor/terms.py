"""Gradients of the terms of a `Partial` tensor.

The gradient of a tensor that is `Partial` along some axes is the gradient of its value v, the same
on all ranks of these axes. With n ranks, the gradient of a rank's term t_r is:

    sum        v = t_0 + ... + t_(n-1)          grad
    avg        v = (t_0 + ... + t_(n-1)) / n    grad / n
    max, min   v = one of the terms             grad on the rank whose term it is (on the first one
                                                of equal terms), 0 on others
    product    v = t_0 * ... * t_(n-1)          grad times the product of the other ranks' terms

Ranks are those of all axes with the same reduction together, in the order of their coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from dure.comm import differentiable as maps
from dure.comm.ops import ReduceOp
from dure.comm.world import when_left
from dure.tensor.placement_types import Partial
from dure.tensor.redistribute import all_reduce_of
from dure.tensor.spec import DTensorSpec

__all__ = ["averaged_over", "gradient_of_term", "needs_terms", "selected_by"]

_BY_VALUE = ("max", "min", "product")
"""Reductions whose gradients depend on the values of the terms."""


def _axes_of(spec: DTensorSpec, *reductions: str) -> list[int]:
    placed = enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
    return [a for a, (n, p) in placed if n > 1 and any(map(p.is_partial, reductions))]


@lru_cache(maxsize=1 << 12)
def averaged_over(spec: DTensorSpec) -> int:
    """Return the number of ranks over whose terms a value is averaged."""
    return math.prod(spec.mesh.shape[axis] for axis in _axes_of(spec, "avg"))


@lru_cache(maxsize=1 << 12)
def selected_by(spec: DTensorSpec) -> str | None:
    """Return the reduction of a spec if it is max, min or product; else None."""
    axes = _axes_of(spec, *_BY_VALUE) if spec.partial else []
    placement = spec.placements[axes[0]] if axes else None
    return placement.reduce_op if isinstance(placement, Partial) else None


when_left.extend(table.cache_clear for table in (averaged_over, selected_by))


def needs_terms(spec: DTensorSpec) -> bool:
    """Return whether `gradient_of_term` needs the term."""
    return selected_by(spec) is not None


def gradient_of_term(
    grad: torch.Tensor, term: torch.Tensor | None, spec: DTensorSpec
) -> torch.Tensor:
    """Return the gradient of this rank's term from the gradient of the value, differentiably.

    Args:
        grad: The gradient of the value.
        term: This rank's term, if `needs_terms`.
        spec: The spec of the Partial tensor.

    Collective:
        If `needs_terms`: all ranks of the mesh.

    Cost:
        For max and min two all_reduces for each axis, for a product an all_gather.
    """
    if not spec.partial:
        return grad
    op = selected_by(spec)
    if op is None:
        n = averaged_over(spec)
        return grad if n == 1 else grad / n
    assert term is not None
    axes = _axes_of(spec, op)
    if op == "product":
        return grad * _product_of_others(term, spec, axes)
    return torch.where(_has_value(term.detach(), spec, axes, op), grad, 0)


def _number_among(spec: DTensorSpec, axes: Sequence[int]) -> int:
    """Return this rank's number among the ranks of some axes; the last axis runs fastest."""
    assert spec.coordinate is not None
    number = 0
    for axis in axes:
        number = number * spec.mesh.shape[axis] + spec.coordinate[axis]
    return number


def _has_value(term: torch.Tensor, spec: DTensorSpec, axes: Sequence[int], op: str) -> torch.Tensor:
    """Return where this rank is the first with the maximum or minimum; a NaN counts as either."""
    value = term.clone(memory_format=torch.contiguous_format)
    all_reduce_of(spec, axes, value, ReduceOp.MAX if op == "max" else ReduceOp.MIN)
    number = _number_among(spec, axes)
    has = (term == value) | (term.isnan() & value.isnan())
    first = torch.where(has, number, torch.iinfo(torch.int32).max).to(torch.int32).contiguous()
    all_reduce_of(spec, axes, first, ReduceOp.MIN)
    return first == number


def _product_of_others(term: torch.Tensor, spec: DTensorSpec, axes: Sequence[int]) -> torch.Tensor:
    gathered = term.contiguous().unsqueeze(0)
    for axis in reversed(axes):
        (gathered,) = maps.apply(maps.AllGather(spec.mesh.get_group(axis), 0), gathered, wait=True)
    number = _number_among(spec, axes)
    return torch.cat([gathered[:number], gathered[number + 1 :]]).prod(0)
