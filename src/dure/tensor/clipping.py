"""Clipping by the norm of all gradients, whatever meshes they are on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dure.comm.ops import ReduceOp
from dure.errors import UsageError
from dure.tensor.rules.foreach import norm_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` does the same, with a reduction for each gradient; this one
    reduces once for all gradients that lie alike.

    Args:
        parameters: Parameters of any meshes, and plain ones, whose gradients are the same on all
            ranks but those of `process_group`.
        max_norm: The largest norm allowed.
        norm_type: The p of the norm, above 0; may be inf.
        error_if_nonfinite: Raise, on all ranks, where the norm is inf or NaN.
        process_group: Ranks each of which has other parameters, such as the stages of a pipeline:
            `mesh.get_group("pp")`. What two of them share (a tied embedding) counts twice.

    Returns:
        The norm before clipping, float32 [], a plain tensor.

    Raises:
        UsageError: `norm_type` is not positive, or the norm is not finite and shall be.

    Collective:
        All ranks of the meshes, and of `process_group`, also one that has no gradient.

    Cost:
        One all_reduce of 8 bytes for each mesh and set of axes that cut gradients, and one more
        for `process_group`.

    Numerics:
        Parts are added in the order of ranks; the norm is bitwise equal on all of them.
    """
    p = float(norm_type)
    if not p > 0:
        raise UsageError(
            "clip_grad_norm_ needs a norm whose parts can be combined",
            seen=f"norm_type={norm_type}",
            fix="Use 1, 2 or inf.",
        )
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [g for g in (p.grad for p in given) if g is not None]
    total = norm_of(grads, p).double()
    if process_group is not None:
        total = _over(process_group, total, p)
    norm = total.float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise UsageError(
            "the norm of the gradients is not finite",
            op="clip_grad_norm_",
            seen=f"{float(norm)}",
            fix="Skip the step, or pass error_if_nonfinite=False.",
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))  # pyright: ignore
    return norm


def _over(group: ProcessGroup, part: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm of numbers, one a rank."""
    if math.isinf(p):
        total = part.clone()
        group.all_reduce(total, ReduceOp.MAX)
        return total
    total = part**p
    group.all_reduce(total, ReduceOp.SUM)
    return total ** (1.0 / p)
