"""DTensors in autograd: `from_local`, `to_local` and `redistribute` with their gradients.

Operators do not use this module: autograd runs their formulas on DTensors. It covers the steps
between parts and DTensors, and redistributions. Arguments are checked in dtensor.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.capture import capturing, refuse_in_jit_trace
from dure.comm.pending import wait_tensor
from dure.comm.untraced import untraced_below
from dure.errors import PlacementError, UsageWarning
from dure.tensor.dispatch import check_copy
from dure.tensor.placement_types import Partial, Placement, Replicate
from dure.tensor.redistribute import Move, plan_of, redistribute
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of
from dure.tensor.strides import laid
from dure.tensor.terms import averaged_over, gradient_of_term, needs_terms, selected_by
from dure.tensor.wrapping import dtensor_type, wrap
from dure.trace.ring import call_site

if TYPE_CHECKING:
    from dure.tensor.dtensor import DTensor

__all__ = [
    "divided_gradient",
    "from_part",
    "have_one_memory",
    "moved_gradient",
    "part_of",
    "to_target",
]


@untraced_below
def from_part(
    local: torch.Tensor, spec: DTensorSpec, grads: tuple[Placement | None, ...] | None = None
) -> DTensor:
    """Wrap a part for autograd: `DTensor.from_local` after its checks.

    Args:
        local: The part.
        spec: Of the tensor.
        grads: The placements that the gradient is redistributed to. None along an axis: Replicate,
            or Partial if the gradient is Partial.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        refuse_in_jit_trace("DTensor.from_local")
        outside = spec.coordinate is None
        return wrap(spec.part_outside() if outside else local.detach(), spec)
    return _FromLocal.apply(local, spec, grads)  # pyright: ignore


@untraced_below
def to_target(
    tensor: DTensor,
    target: DTensorSpec,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Redistribute for autograd: `DTensor.redistribute` after its checks."""
    check_copy("redistribute", tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _redistributed(tensor, target, async_op, forward_dtype)
    dtypes = forward_dtype, backward_dtype
    return _Redistribute.apply(tensor, target, async_op, *dtypes)  # pyright: ignore


def part_of(
    tensor: DTensor,
    grads: tuple[Placement, ...] | None = None,
    assumed_by: tuple[str, DTensorSpec] | None = None,
) -> torch.Tensor:
    """Return a rank's part to autograd.

    Args:
        tensor: The tensor.
        grads: The placements of the part's gradient; None: those of the tensor, with Replicate in
            place of Partial.
        assumed_by: The method that the program called without `grad_placements`, and the spec of
            the tensor that it was called on: for a warning if the gradient is ambiguous.
    """
    refuse_in_jit_trace("a DTensor")
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return wait_tensor(tensor.part)
    assumption = None
    if assumed_by is not None and (tensor.ndim or tensor.is_leaf) and _ambiguous_axes(tensor.spec):
        assumption = (*assumed_by, call_site())
    return _ToLocal.apply(tensor, grads, assumption)  # pyright: ignore


def _ambiguous_axes(spec: DTensorSpec) -> list[int]:
    """Return the axes along which a part's gradient may be Replicate or Partial."""
    placed = enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
    return [axis for axis, (n, placement) in placed if n > 1 and not placement.is_shard()]


_warned_lines: set[str] = set()
"""Lines of the program for which the assumption of `to_local` or `full_tensor` was reported."""


def _warn_of_assumption(op: str, spec: DTensorSpec, site: str, axes: Sequence[int]) -> None:
    """Warn, once for each line, that a gradient was assumed to be the same on all ranks."""
    if site in _warned_lines:
        return
    _warned_lines.add(site)
    names = spec.mesh.mesh_dim_names
    along = " and ".join(names[axis] if names else f"axis {axis}" for axis in axes)
    file, _, line = site.rpartition(":")
    warnings.warn_explicit(
        f"{op}() of {spec}: its gradient was assumed to be the same on all ranks of {along}. "
        "If ranks use the result differently, each rank's gradient is only a part of a sum, and "
        "that sum is not computed: pass grad_placements with Partial() for these axes, or with "
        "Replicate() if the gradient is the same. (Shown once for this line.)",
        UsageWarning,
        file,
        int(line),
    )


def moved_gradient(grad: DTensor, placements: Sequence[Placement], name: str = "") -> DTensor:
    """Return a gradient with other placements; differentiable if backward creates a graph."""
    spec = grad.spec
    target = spec.with_placements(placements)
    if target is spec and grad.copied_at is None:
        return grad
    if grad.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(grad, target, False, None, None)  # pyright: ignore
    return wrap(redistribute(grad.part, spec, target, name=name), target.compact())


def divided_gradient(grad: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a gradient as a DTensor, also if a formula of torch made a plain one.

    Some formulas, such as that of `sgn`, create zeros of the full shape: every rank has them.

    Args:
        grad: The gradient, a DTensor or the full one.
        spec: Of the tensor whose gradient it is.
    """
    if type(grad) is dtensor_type():
        return grad
    if grad._is_zerotensor():  # it has no memory
        grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    full = spec_of(spec.mesh, spec.replicated().placements, TensorMeta.of(grad))
    return moved_gradient(wrap(grad, full), spec.without_partial().placements)


class _FromLocal(torch.autograd.Function):
    """Wraps a part; its gradient is the part of the DTensor's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        spec: DTensorSpec,
        grads: tuple[Placement | None, ...] | None,
    ) -> DTensor:
        ctx.spec = spec
        ctx.grads = spec.without_partial().placements if grads is None else grads
        if spec.partial and needs_terms(spec):
            ctx.save_for_backward(wait_tensor(local))
        if capturing((local,)):  # a graph of the forward alone has other gradients than DTensors
            return wrap(local.detach(), spec)
        outside = spec.coordinate is None
        return wrap(spec.part_outside() if outside else local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        spec = ctx.spec
        if spec.coordinate is None:
            return None, None, None
        grad = divided_gradient(grad_outputs[0], spec)
        placements: list[Placement] = [
            wanted or (current if current.is_partial() else Replicate())
            for wanted, current in zip(ctx.grads, grad.spec.placements, strict=True)
        ]
        # A rank uses its copy of a Partial tensor's gradient for its own term alone, so in a second
        # backward the gradients of these copies are terms of a sum.
        back = _of_second_backward(spec.placements, placements, Partial())
        part = part_of(moved_gradient(grad, placements), back)
        term = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return gradient_of_term(part, term, spec), None, None


class _ToLocal(torch.autograd.Function):
    """Unwraps a part; the part's gradient becomes the gradient of the DTensor."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        grads: tuple[Placement, ...] | None,
        assumption: tuple[str, DTensorSpec, str] | None,
    ) -> torch.Tensor:
        ctx.spec, ctx.grads, ctx.assumption = tensor.spec, grads, assumption
        local = wait_tensor(tensor.part)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,), source = grad_outputs, ctx.spec
        if ctx.assumption is not None:
            op, before, site = ctx.assumption
            _warn_of_assumption(op, before, site, _ambiguous_axes(source))
        reduced = source.without_partial()
        spec = (reduced if ctx.grads is None else source.with_placements(ctx.grads)).compact()
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        if grad.dtype != spec.meta.dtype:
            spec = spec.with_dtype(grad.dtype)
        grad = laid(grad, spec.order)
        if source.partial:
            grad = _gradient_of_value(grad, source, spec)
        if not (grad.requires_grad and torch.is_grad_enabled()):
            return wrap(grad, spec), None, None
        # The gradient of a term was wrapped as that of the value; its own gradient may be Partial.
        back = _of_second_backward(source.placements, spec.placements, None)
        return from_part(grad, spec, back), None, None


def _of_second_backward(
    forward: Sequence[Placement], backward: Sequence[Placement], of_terms: Any
) -> tuple[Any, ...]:
    """Return the placements of the gradient of a gradient, in a second backward.

    Args:
        forward: The placements of the tensor.
        backward: The placements of its gradient.
        of_terms: Used along axes where the tensor is Partial and its gradient Replicate.
    """
    return tuple(
        Replicate() if there.is_partial()
        else of_terms if here.is_partial() and there.is_replicate()
        else there
        for here, there in zip(forward, backward, strict=True)
    )  # fmt: skip


def _gradient_of_value(grad: torch.Tensor, source: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    """Return the gradient of a value from the gradient of this rank's term of it.

    Raises:
        PlacementError: The value is a maximum, minimum or product.
    """
    op = selected_by(source)
    if op is not None:
        raise PlacementError(
            f"the gradient of one rank's term does not determine that of a {op}",
            op="to_local",
            seen=f"a gradient for the part of {source}",
            fix="Reduce it first: redistribute(placements=[Replicate()]).to_local(), or "
            "full_tensor().",
        )
    n = averaged_over(source)
    return grad if n == 1 else grad * n


def _redistributed(
    tensor: DTensor, target: DTensorSpec, async_op: bool, dtype: torch.dtype | None
) -> DTensor:
    """Return a tensor with other placements, cast before it is sent; without autograd."""
    spec, local = tensor.spec, tensor.part
    if dtype is not None and dtype != local.dtype:
        local = local.to(dtype)
        spec, target = spec.with_dtype(dtype), target.with_dtype(dtype)
    moved = redistribute(local, spec, target, async_op)
    if moved is local:
        return wrap(local if async_op else local.view_as(local), target)
    if plan_of(spec, target).steps[-1].move is Move.SLICE and have_one_memory(moved, local):
        moved = moved.clone()  # a slice shares memory with the full tensor, which may be written
    return wrap(moved, target.compact())


def have_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share a storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _Redistribute(torch.autograd.Function):
    """Redistributes; the gradient is redistributed back, except to Partial: it stays replicated."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.placements, ctx.target = tensor.spec.without_partial().placements, target
        ctx.dtypes = tensor.spec.meta.dtype, backward_dtype
        return _redistributed(tensor, target, async_op, forward_dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad: Any = divided_gradient(grad_outputs[0], ctx.target)
        dtype, backward_dtype = ctx.dtypes
        if backward_dtype is not None and grad.dtype != backward_dtype:
            grad = grad.to(backward_dtype)
        placements = tuple(
            there if there.is_partial() and here.is_replicate() else here
            for here, there in zip(ctx.placements, grad.spec.placements, strict=True)
        )
        grad = moved_gradient(grad, placements)
        return (grad if grad.dtype == dtype else grad.to(dtype)), None, None, None, None
