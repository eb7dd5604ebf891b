"""Clipping by the norm of gradients that lie on different ranks.

The norm of a vector that is cut into parts is found from the norms of its parts: for the p-norm,

    norm = (sum over parts of part_norm ** p) ** (1 / p),      for p = inf the largest part_norm.

So each rank takes the norm of the gradients it owns, one all_reduce combines n numbers, and each
rank scales its own part by the same factor.

Where every rank holds all gradients (DDP, also with an optimizer that shards only its state), the
norm is complete everywhere and torch's own `clip_grad_norm_` is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dure.comm.world import resolve

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale the gradients that this rank owns so that all ranks' norm is at most `max_norm`.

    The arguments are those of `torch.nn.utils.clip_grad_norm_`; but every gradient must be given by
    exactly one rank. For gradients that all ranks hold use torch's function. DTensors are counted
    whole: a gradient that is cut over another axis of the mesh is given by all ranks of that axis.

    Collective: all ranks of the group, also one that owns no gradient.
    Cost: one all_reduce of 8 bytes.
    Numerics: parts are added in the order of ranks; the norm is bitwise equal on all of them.

    Args:
        parameters: The parameters whose gradients this rank owns.
        max_norm: The largest norm allowed.
        norm_type: The p of the norm, above 0; may be inf.
        error_if_nonfinite: Raise, on all ranks, where the norm is inf or NaN.
        foreach: Taken as torch's, and changes nothing: lists of gradients are scaled at once.
        process_group: The ranks that own the gradients; all by default.

    Returns:
        The norm over all ranks before clipping, float32 []; on the device of the gradients.

    Raises:
        UsageError: `norm_type` is not positive, or the norm is not finite and shall be.
    """
    from dure.tensor.clipping import clip_grad_norm_  # lazy: data parallel jobs use no DTensor

    del foreach
    group = resolve(process_group, "clip_grad_norm_")
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, process_group=group)
