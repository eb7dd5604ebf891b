"""Tensors whose elements are stored in the same order.

Torch's fused kernels for the CPU read parameters, gradients and state from the first element on,
side by side, and look at no strides. So what is given to them must be stored in one order, without
gaps. Autograd sees to that for gradients of plain parameters. It does not for parameters with gaps,
nor for a gradient whose DTensor has other strides than its part, or that a program has set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_dense", "laid", "stored_like", "with_equal_strides", "write_back"]

_is_contiguous = torch.Tensor.is_contiguous


def laid(part: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """Return a part whose dimensions are stored in this order, without gaps; a copy if needed.

    Args:
        part: The part.
        order: Its dimensions, from the one with the largest strides on; None for rows.
    """
    if order is None:
        return part.contiguous()
    back = [order.index(dim) for dim in range(len(order))]
    return part.permute(*order).contiguous().permute(back)


def stored_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the order of another one of its shape, itself if it has it already.

    If the other one has gaps, or elements that share memory, the order is that of rows.
    """
    stride = other.stride() if is_dense(other) else _rows(other)
    if _same_order(tensor, stride):
        return tensor
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def with_equal_strides(
    lists: Sequence[Sequence[Any]],
) -> tuple[list[list[Any]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return lists in which all tensors at one position are stored in one order, without gaps.

    Args:
        lists: Of tensors of one shape at each position, of numbers, or of None; or empty.

    Returns:
        The lists, with copies where needed, and for each copy the tensor and the copy, so that
        `write_back` hands on what a kernel has written.
    """
    try:
        if all(all(map(_is_contiguous, each)) for each in lists):
            return [*map(list, lists)], []
    except TypeError:  # there is None among them
        pass
    made = [*map(list, lists)]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, first in enumerate(made[0]):
        for each in made:
            tensor = each[number] if each else None
            if tensor is None or tensor.shape != first.shape:  # such as a count of steps
                continue
            copy = stored_like(tensor, first)
            if copy is not tensor:
                each[number] = copy
                copies.append((tensor, copy))
    return made, copies


def write_back(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Hand on to tensors what was written to their copies."""
    with torch.no_grad():
        for tensor, copy in copies:
            tensor.copy_(copy)


def _rows(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape whose last dimension is contiguous."""
    return torch.empty(tensor.shape, device="meta").stride()


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether elements are stored without gaps, each in memory of its own."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _same_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Tell whether a tensor has these strides, along dimensions in which there are any steps."""
    have = tensor.stride()
    if have == stride or tensor.numel() < 2:
        return True
    both = zip(tensor.shape, have, stride, strict=True)
    return all(size < 2 or one == other for size, one, other in both)
