"""Convolutions, pooling and resampling: batch and channels may be sharded, spatial dims may not.

A convolution sums over its input channels: if they are sharded, the result is Partial, and only
the first rank along that axis adds the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dure.tensor.call import SUM, AxisStrategy, OpCall, R, linear_in, same_placement, with_one
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, with_argument, zeros_where_empty
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten


def _channel_dims(call: OpCall) -> tuple[int, int]:
    """Return the weight's dimensions of output channels and of input channels."""
    return (1, 0) if call.arg("transposed") else (0, 1)


def _is_first(spec: DTensorSpec, dim: int) -> bool:
    """Return whether this rank is the first along the axes that cut a dimension."""
    at = spec.coordinate or ()
    return all(here == 0 for here, p in zip(at, spec.placements, strict=False) if p.is_shard(dim))


def _convolution_local(call: OpCall) -> Callable[..., Any] | None:
    """Add the bias only on the first of the ranks whose terms are summed."""
    op = call.op
    biased = call.operand("bias") is not None and _is_first(call.operands[0], 1)
    if zeros_where_empty(call) is not None:
        shape = call.result.local_shape

        def nothing(x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> torch.Tensor:
            made = x.new_zeros(shape)
            return made.add_(bias.view(-1, *[1] * (len(shape) - 2))) if biased else made

        return nothing
    if biased or call.operand("bias") is None:
        return None
    return lambda x, weight, bias, *args: op(x, weight, None, *args)


@rule(aten.convolution.default, local=_convolution_local)
def _convolution(call: OpCall) -> list[AxisStrategy]:
    biased = len(call.operands) == 3
    out, into = _channel_dims(call)

    def strategy(x: Placement, weight: Placement, bias: Placement, y: Placement) -> AxisStrategy:
        return AxisStrategy((x, weight, bias) if biased else (x, weight), (y,))

    found = [strategy(Shard(0), R, R, Shard(0))]
    if call.arg("groups") == 1:
        found.append(strategy(R, Shard(out), Shard(0), Shard(1)))
        found.append(strategy(Shard(1), Shard(into), R, SUM))
    for term in linear_in(call):
        found += [strategy(term, R, term, term), strategy(R, term, term, term)]
    return found


def _convolution_backward_local(call: OpCall) -> Callable[..., Any] | None:
    """Pass the number of this rank's output channels.

    A rank without input channels still computes the complete gradient of the bias.
    """
    nothing = zeros_where_empty(call)
    bias = call.results[2]
    if bias is None:
        return nothing
    if nothing is not None:
        space = [dim for dim in range(call.operands[0].ndim) if dim != 1]

        def summed(grad: torch.Tensor, *args: Any) -> tuple[Any, ...]:
            return (*nothing(grad, *args)[:2], grad.sum(space))

        return summed
    return with_argument(call, "bias_sizes", bias.local_shape)


@rule(aten.convolution_backward.default, local=_convolution_backward_local)
def _convolution_backward(call: OpCall) -> list[AxisStrategy]:
    out, into = _channel_dims(call)
    found = [AxisStrategy((Shard(0), Shard(0), R), (Shard(0), SUM, SUM))]
    if call.arg("groups") == 1:
        found.append(AxisStrategy((Shard(1), R, Shard(out)), (SUM, Shard(out), Shard(0))))
        # Each rank has the full gradient of the output, so the bias's gradient is complete.
        found.append(AxisStrategy((R, Shard(1), Shard(into)), (Shard(1), Shard(into), R)))
    return found + with_one(call)


# ---- pooling and resampling ----------------------------------------------------------------------

_SPACE = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d",
    "avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
    "avg_pool3d", "_adaptive_avg_pool3d", "max_pool3d_with_indices", "adaptive_max_pool3d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d",
)  # fmt: skip
"""Operators on the last dimensions; the digit before the d in the name is their number."""
_LINEAR = ("avg_pool", "upsample", "backward")
_OPS = [getattr(aten, name + end, None) for name in _SPACE for end in ("", "_backward")]


def _space_local(call: OpCall) -> Callable[..., Any] | None:
    """Pass the size of this rank's part as `input_size`."""
    nothing = zeros_where_empty(call)
    if nothing is not None or not call.has("input_size"):
        return nothing
    return with_argument(call, "input_size", call.result.local_shape)


@rule(*(op.default for op in _OPS if op is not None), local=_space_local)
def _before_space(call: OpCall) -> list[AxisStrategy]:
    (dims,) = (n for n in (1, 2, 3) if f"{n}d" in call.name)
    found = same_placement(call, map(Shard, range(call.operands[0].ndim - dims)))
    return found + (with_one(call) if any(part in call.name for part in _LINEAR) else [])
