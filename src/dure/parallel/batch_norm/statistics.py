"""Batch normalisation over the batches of all ranks: the arithmetic, and its two collectives.

Shape letters: N batch, C channels, * any further dimensions; k_r = the number of values a channel
has on rank r, K = their sum over the n ranks.

*Forward.* Each rank takes the mean m_r [C] and the sum of squared deviations from it, q_r [C], of
its own values, and sends both with k_r. From all of them every rank computes, in rank order,

    m = sum_r k_r m_r / K                 q = sum_r (q_r + k_r (m_r - m)^2)         var = q / K

(Chan, Golub and LeVeque's merge). Deviations are taken from means, never as a difference of
squares, so that nothing cancels where the mean is large against the spread. A rank without values
has k_r = 0 and weighs nothing.

*Backward.* With x^ = (x - m) / sqrt(var + eps), w the weight, g the gradient of the output, and the
means over all K values of a channel,

    dx = w / sqrt(var + eps) * (g - mean(g) - x^ mean(g x^))

so each rank sends the sums of g and of g (x - m) over its values. The gradients of weight and bias
are the rank's own sums: DDP averages them like all others.

Statistics are of float32 for inputs of 32 bits and less, and of float64 for float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from dure.errors import ShapeError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Moments", "NormalizeOverRanks", "Running", "local_moments", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What is known of a set of values, for each channel.

    Shapes:
        mean, squares [C]: mean, and sum of squared deviations from it; of the statistics' dtype.
    """

    count: float
    mean: torch.Tensor
    squares: torch.Tensor


def local_moments(input: torch.Tensor) -> Moments:
    """Return the moments of one rank's values.

    Shapes:
        input [N, C, *]: N may be 0.
    """
    channels = input.size(1)
    count = input.numel() // channels
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    if count == 0:
        nothing = torch.zeros(channels, dtype=dtype, device=input.device)
        return Moments(count=0, mean=nothing, squares=nothing)
    values = input.to(dtype)
    dims = [d for d in range(input.dim()) if d != 1]
    # Two passes: four times as fast as torch.var_mean, which walks such strides one by one.
    mean = values.mean(dims)
    deviations = values - mean.view([1, -1] + [1] * (input.dim() - 2))
    return Moments(count=count, mean=mean, squares=deviations.square_().sum(dims))


def merged(table: torch.Tensor) -> Moments:
    """Merge the moments of several sets of values, in the order of rows.

    Shapes:
        table [n, 2C + 1]: a row holds mean, squares and count of one set.
    """
    channels = (table.size(1) - 1) // 2
    means, squares = table[:, :channels], table[:, channels : 2 * channels]
    counts = table[:, 2 * channels :]
    count = counts.sum()
    if count == 0:
        return Moments(count=0, mean=means[0], squares=squares[0])
    mean = (counts * means).sum(0) / count
    spread = squares + counts * (means - mean) ** 2
    return Moments(count=float(count), mean=mean, squares=spread.sum(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Running statistics to update, in place.

    Attributes:
        mean: [C], or None where none are kept.
        variance: [C], likewise.
        factor: The weight of the new values.
    """

    mean: torch.Tensor | None
    variance: torch.Tensor | None
    factor: float

    def update(self, moments: Moments) -> None:
        """Take in the moments of a batch; the variance is corrected for its size, as torch's."""
        if self.mean is None or self.variance is None or moments.count == 0:
            return
        unbiased = moments.squares / (moments.count - 1)
        for kept, new in ((self.mean, moments.mean), (self.variance, unbiased)):
            kept.mul_(1 - self.factor).add_(new.to(kept.dtype), alpha=self.factor)


class NormalizeOverRanks(torch.autograd.Function):
    """Normalise [N, C, *] by the mean and variance over all ranks' values.

    Collective:
        Forward (one all_gather of 2C + 1 numbers) and, where the input needs a gradient, backward
        (one all_reduce of 2C numbers), on all ranks of the group, also on one with N = 0.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # autograd's, with attributes of ours
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Running,
        eps: float,
        group: ProcessGroup,
    ) -> torch.Tensor:
        """Return the normalised input, in its dtype and memory format."""
        moments = _over_ranks(input, group)
        running.update(moments)
        variance = moments.squares / max(moments.count, 1)
        ctx.group, ctx.count = group, moments.count
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, moments.mean, inverse)
        if input.numel() == 0:
            return torch.empty_like(input)
        dtype = moments.mean.dtype
        return torch.nn.functional.batch_norm(
            input,
            moments.mean,
            variance,
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            training=False,
            eps=eps,
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = [d for d in range(input.dim()) if d != 1]
        slope = grad.to(mean.dtype)
        centred = input.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([slope.sum(dims), (slope * centred).sum(dims)])  # [2, C]
        grad_input: torch.Tensor | None = None
        grad_weight = sums[1] * inverse if ctx.needs_input_grad[1] else None
        grad_bias = sums[0].clone() if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            ctx.group.all_reduce(sums)
            sums /= max(ctx.count, 1)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            centred *= (sums[1] * inverse**2).view(shape)
            slope = slope - sums[0].view(shape)
            grad_input = slope.sub_(centred).mul_(scale.view(shape)).to(input.dtype)
        kind = None if weight is None else weight.dtype
        return (
            grad_input,
            None if grad_weight is None else grad_weight.to(kind),
            None if grad_bias is None else grad_bias.to(kind),
            None,
            None,
            None,
        )


def _over_ranks(input: torch.Tensor, group: ProcessGroup) -> Moments:
    """Return the moments of all ranks' values; one all_gather.

    Raises:
        ShapeError: All ranks together have one value a channel: its variance would be 0.
    """
    mine = local_moments(input)
    row = torch.cat([mine.mean, mine.squares, mine.mean.new_full((1,), mine.count)])
    table = row.new_empty(group.size(), row.numel())
    group.all_gather_single(table, row)
    moments = merged(table)
    if moments.count == 1:
        raise ShapeError(
            "SyncBatchNorm needs more than one value a channel when training",
            seen=f"an input of {list(input.shape)} here, and none on the other ranks",
            rank=group.rank(),
            world_size=group.size(),
            group=group.group_name,
            fix="Use larger batches, or eval().",
        )
    return moments
