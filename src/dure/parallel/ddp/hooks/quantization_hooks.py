"""Hooks that send 8 bits a gradient.

Numbers x are sent as bytes y with a scale s and a zero point z, such that x is about s * (y - z):

    s = (max(x, 0) - min(x, 0)) / 255        z = -min(x, 0) / s, rounded

so that 0 stays exactly 0; a complex number is two of them. Sums of such bytes mean nothing, since
every rank has its own scales; so each rank gathers those of all ranks, and adds up. A rank receives
(n-1) S/4 bytes of float32 gradients: less than an all_reduce up to about 8 ranks, more beyond.

One scale for a complete bucket lets its largest gradient decide how finely the others are seen;
*per channel* there is one for every 512 numbers. Scales travel in front of the bytes, in one
    all_gather:

    | scales (4 bytes each) | zero points (4 bytes each) | numbers (1 byte each) |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dure.parallel.ddp.buckets import GradBucket

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_LEVELS = 255
_SMALLEST_SCALE = torch.finfo(torch.float32).eps


def quantization_pertensor_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits, with one scale for all of it.

    Args:
        process_group: The ranks; those of the DDP module by default.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        S/4 + 8 bytes sent by each rank and read by every other, in one all_gather.

    Example:
        ```python
        from dure.algorithms.ddp_comm_hooks import quantization_hooks

        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        ddp.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert torch.allclose(ddp.module.weight.grad, torch.tensor([[1.5, 1.5]]), atol=0.02)
        ```
    """
    buffer = bucket.buffer()
    return _gathered(process_group or bucket.group, buffer, max(1, buffer.numel()))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits, with one scale for every `bucket_size` numbers.

    Args:
        process_group: The ranks; those of the DDP module by default.
        bucket: The gradients.
        bucket_size: Numbers that share a scale.

    Cost:
        S/4 + 8 bytes a scale sent by each rank and read by every other, in one all_gather.

    Returns:
        A future of the averaged bucket.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        ddp.register_comm_hook(None, quantization_hooks.quantization_perchannel_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert torch.allclose(ddp.module.weight.grad, torch.tensor([[1.5, 1.5]]), atol=0.02)
        ```
    """
    return _gathered(process_group or bucket.group, bucket.buffer(), bucket_size)


def _gathered(
    group: ProcessGroup, buffer: torch.Tensor, per_scale: int
) -> torch.futures.Future[torch.Tensor]:
    """Average `buffer` [k] over `group`, in rows of `per_scale` numbers."""
    numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    missing = -numbers.numel() % per_scale
    rows = torch.nn.functional.pad(numbers.float(), (0, missing)).view(-1, per_scale)
    mine = _packed(rows)
    theirs = torch.empty(group.size() * mine.numel(), dtype=torch.uint8, device=mine.device)
    work = group.all_gather_single(theirs, mine, async_op=True)
    assert work is not None

    def add_up(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()
        total = torch.zeros_like(rows)
        for one in theirs.view(group.size(), -1):
            total += _unpacked(one, rows.shape[0], per_scale)
        numbers.copy_(total.div_(group.size()).view(-1)[: numbers.numel()])
        return buffer

    return work.get_future().then(add_up)


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """Return [rows, k] float32 as bytes, with scales and zero points in front."""
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    scale = ((high - low) / _LEVELS).clamp(min=_SMALLEST_SCALE)
    zero = torch.round(-low / scale).clamp(0, _LEVELS)
    levels = torch.round(rows / scale[:, None]) + zero[:, None]
    numbers = levels.clamp(0, _LEVELS).to(torch.uint8).view(-1)
    return torch.cat([torch.cat([scale, zero]).view(torch.uint8), numbers])


def _unpacked(packed: torch.Tensor, num_rows: int, per_scale: int) -> torch.Tensor:
    """Return what `_packed` got, as [rows, k] float32, up to the rounding."""
    split = 8 * num_rows
    scale, zero = packed[:split].clone().view(torch.float32).view(2, num_rows, 1)
    return scale * (packed[split:].view(num_rows, per_scale).float() - zero)
