"""`scale_by`: gradients that are exact per token, where ranks have different numbers of them.

Data-parallel training averages gradients over ranks. A mean over each rank's own tokens then weighs
a token of a rank with few of them more than one of a rank with many; so does a mean over each
microbatch. One process would compute the sum of all tokens' losses over their number T:

    1/T * sum over all tokens  =  1/N * sum over ranks of (N/T * the sum over its tokens)

So each of N ranks multiplies the *sum* of its losses by N/T, and the average does the rest. Axes
whose ranks have other tokens (data, context) add to T as they do to N; on those whose ranks have
the same ones (tensor, pipeline) both count as often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.ops import ReduceOp
from dure.comm.world import resolve
from dure.errors import UsageError
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["scale_by"]

Tokens = int | float | torch.Tensor


def scale_by(
    tokens: Tokens | Sequence[Tokens], ranks: ProcessGroup | DeviceMesh | None = None
) -> float:
    """Return the factor for sums of losses with which averaged gradients are exact per token.

    It is for gradients that are averaged over `ranks`: by `fully_shard`, by
    `DistributedDataParallel`, with accumulation or without. The mean over ranks of the losses so
    scaled, added up over the step, is the exact loss per token.

    Args:
        tokens: This rank's training tokens of the step: a number, a mask or weights of its
            tokens, which are added up, or one of these for each microbatch. A rank may have none.
        ranks: A group, or all of a mesh; the world where None. Ranks of a tensor-parallel or
            pipeline axis may be among them: each gives the tokens that it works on.

    Returns:
        The number of ranks over that of all their tokens; 0.0 where there are none.

    Raises:
        UsageError: On all ranks: a count of some is negative, or not finite; a DTensor.

    Collective:
        All of `ranks`.

    Cost:
        One all_reduce of 16 bytes; for a mesh, one for each axis.

    Example:
        ```python
        samples = 1 + dist.get_rank()                        # different numbers of samples
        x, y = torch.ones(samples, 4), torch.ones(samples, 1)
        ddp = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        scale = dist.scale_by(samples)                       # once per step, on all ranks
        loss = torch.nn.functional.mse_loss(ddp(x), y, reduction="sum") * scale
        loss.backward()                                      # of the mean over all samples
        ```
    """
    each = tokens if isinstance(tokens, Sequence) else [tokens]
    seen = sum(map(_count, each))
    is_wrong = not (math.isfinite(seen) and seen >= 0)
    group = None if isinstance(ranks, DeviceMesh) else resolve(ranks, "scale_by")
    groups = [group] if group is not None else _groups_of(ranks)
    counted = [0.0 if is_wrong else seen, is_wrong]
    total = torch.tensor(counted, dtype=torch.float64, device=groups[0].message_device)
    for one in groups:
        one.all_reduce(total, ReduceOp.SUM)
    count, wrong = total.tolist()
    if wrong:
        mine = f"{seen} here" if is_wrong else f"this rank's {seen:g} is right"
        raise UsageError(
            "a rank counts tokens that cannot be",
            op="scale_by",
            seen=mine,
            fix="Give numbers, masks or weights of a rank's own tokens; to_local() of a DTensor.",
        )
    return math.prod(one.size() for one in groups) / count if count else 0.0


def _count(tokens: Tokens) -> float:
    """Return how many tokens these are; NaN for what is none of this rank's own."""
    if isinstance(tokens, DTensor):
        return math.nan
    if isinstance(tokens, torch.Tensor):
        return float(tokens.sum(dtype=torch.float64))
    return float(tokens)


def _groups_of(mesh: object) -> list[ProcessGroup]:
    assert isinstance(mesh, DeviceMesh)
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]
