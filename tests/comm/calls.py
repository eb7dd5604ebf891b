"""Calls as tests make them: one function an operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.call import Call
from dure.comm.ops import ReduceOp


def all_reduce(tensor: torch.Tensor, op: ReduceOp) -> Call:
    """Reduce `tensor` [*] of all ranks, in place, on all ranks."""
    both = (tensor,)
    return Call(op="all_reduce", inputs=both, outputs=both, reduction=op)


def reduce(tensor: torch.Tensor, dst: int, op: ReduceOp) -> Call:
    """Reduce `tensor` [*] of all ranks into that of `dst`; the others' stay as they are."""
    both = (tensor,)
    return Call(op="reduce", inputs=both, outputs=both, reduction=op, root=dst)


def reduce_scatter(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> Call:
    """Reduce `inputs[i]` of all ranks into rank i's `output`; lengths may differ with i."""
    return Call(op="reduce_scatter", inputs=inputs, outputs=(output,), reduction=op)


def reduce_scatter_single(output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> Call:
    """Reduce part i [k] of `tensor` [n*k] of all ranks into rank i's `output` [k]."""
    return Call(op="reduce_scatter_single", inputs=(tensor,), outputs=(output,), reduction=op)


def broadcast(tensor: torch.Tensor, src: int) -> Call:
    """Copy `tensor` [*] of `src` to all."""
    both = (tensor,)
    return Call(op="broadcast", inputs=both, outputs=both, root=src)


def all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Call:
    """Copy rank i's `tensor` to `outputs[i]` on all ranks; lengths may differ between ranks."""
    return Call(op="all_gather", inputs=(tensor,), outputs=outputs)


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor) -> Call:
    """Copy rank i's `tensor` [k] to `output` [n*k] at i*k on all ranks."""
    return Call(op="all_gather_single", inputs=(tensor,), outputs=(output,))


def gather(outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Call:
    """Copy rank i's `tensor` to `outputs[i]` on `dst` (None elsewhere)."""
    return Call(op="gather", inputs=(tensor,), outputs=outputs or (), root=dst)


def scatter(tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Call:
    """Copy `inputs[i]` of `src` (None elsewhere) to rank i's `tensor`."""
    return Call(op="scatter", inputs=inputs or (), outputs=(tensor,), root=src)


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
    return Call(op="all_to_all", inputs=inputs, outputs=outputs)


def all_to_all_single(output: torch.Tensor, tensor: torch.Tensor) -> Call:
    """Copy part j [k] of rank i's `tensor` [n*k] to part i of rank j's `output` [n*k]."""
    return Call(op="all_to_all_single", inputs=(tensor,), outputs=(output,))


def barrier() -> Call:
    """Return when all ranks have called."""
    return Call(op="barrier")
