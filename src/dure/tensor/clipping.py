"""Clipping by the norm of all gradients, whatever meshes they are on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from dure.errors import UsageError
from dure.tensor.rules.foreach import norm_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` does the same, with a reduction for each gradient; this one
    reduces once for all gradients that lie alike. For gradients of which each rank owns some, use
    `dure.clip_grad_norm_`.

    Args:
        parameters: Parameters of any meshes, and plain ones, whose gradients are the same on all
            ranks.
        max_norm: The largest norm allowed.
        norm_type: The p of the norm; may be inf.
        error_if_nonfinite: Raise, on all ranks, where the norm is inf or NaN.

    Returns:
        The norm before clipping, float32 [], a plain tensor.

    Raises:
        UsageError: The norm is not finite and shall be.

    Collective:
        All ranks of the meshes.

    Cost:
        One all_reduce of 8 bytes for each mesh and set of axes that cut gradients.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [g for g in (p.grad for p in given) if g is not None]
    norm = norm_of(grads, float(norm_type)).float()
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
