"""Hooks that average: as they are, or in 16 bits; and one that sends nothing.

    32 bits  --cast-->  16 bits  --all_reduce, AVG-->  16 bits  --cast-->  32 bits, in the bucket

Half the bytes are sent. The sum is taken in float32 and divided before it is rounded to 16 bits, so
that it cannot overflow where the gradients do not. float16 has 11 bits of precision and ends at
65504; bfloat16 has 8, and the range of float32. Complex gradients go as they are.

A wrapper does the same around another hook, which then works on 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dure.comm.ops import ReduceOp
from dure.parallel.ddp.buckets import GradBucket

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.comm_hooks import CommHook

__all__ = [
    "allreduce_hook",
    "average",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "unreduced",
]


def average(group: ProcessGroup, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Start to average `tensor` [*] over `group`, in place; return a future of it."""
    if tensor.is_sparse:  # entries are summed; dividing them is cheap
        tensor.div_(group.size())
        work = group.all_reduce(tensor, ReduceOp.SUM, async_op=True)
    else:
        work = group.all_reduce(tensor, ReduceOp.AVG, async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[Any]) -> Any:
    """Return the tensor that a hook's future holds."""
    value = future.value()
    return value if isinstance(value, torch.Tensor) else value[0]


def allreduce_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, as DDP does without a hook.

    Args:
        process_group: The ranks; those of the DDP module by default.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        S bytes, one all_reduce a bucket.

    Example:
        ```python
        from dure.algorithms.ddp_comm_hooks import default_hooks

        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]  # of 1 and 2
        ```
    """
    return average(process_group or bucket.group, bucket.buffer())


def _compressed(
    process_group: ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    buffer, group = bucket.buffer(), process_group or bucket.group
    if not buffer.is_floating_point():  # 16 bits would lose the imaginary part
        return average(group, buffer)
    return _widened(average(group, buffer.to(dtype, copy=True)), buffer)


def _widened(
    small: torch.futures.Future[Any], buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of `small`'s result in the bits of `buffer`, and there if that is dense."""
    if buffer.is_sparse:
        return small.then(lambda future: _first(future).to(buffer.dtype))
    return small.then(lambda future: buffer.copy_(_first(future)))


def fp16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in float16; gradients beyond 65504 become infinite.

    Args:
        process_group: The ranks; those of the DDP module by default.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        S/2 bytes of float32 gradients, one all_reduce a bucket; two passes over it.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]
        ```
    """
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in bfloat16, on any device.

    Args:
        process_group: The ranks; those of the DDP module by default.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        S/2 bytes of float32 gradients, one all_reduce a bucket; two passes over it.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]
        ```
    """
    return _compressed(process_group, bucket, torch.bfloat16)


def _wrapper(hook: CommHook, dtype: torch.dtype, name: str) -> CommHook:
    def compressed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not buffer.is_floating_point():
            return hook(state, bucket)
        bucket.set_buffer(buffer.to(dtype, copy=True))
        return _widened(hook(state, bucket), buffer)

    compressed.__name__ = compressed.__qualname__ = name
    return compressed


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that has `hook` work on the bucket's gradients in float16.

    ``fp16_compress_wrapper(allreduce_hook)`` is `fp16_compress_hook`.

    Args:
        hook: Averages a bucket.

    Returns:
        A hook that takes the same state.

    Example:
        ```python
        hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]
        ```
    """
    return _wrapper(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that has `hook` work on the bucket's gradients in bfloat16.

    Args:
        hook: Averages a bucket.

    Returns:
        A hook that takes the same state.

    Example:
        ```python
        hook = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]
        ```
    """
    return _wrapper(hook, torch.bfloat16, "bf16_compress_wrapper_hook")


def unreduced(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the bucket as it is on this rank."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def noop_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave the gradients as they are on this rank: the ranks' models will differ.

    The step time with this hook is what a step would take if communication were free. DDP itself
    still exchanges one number a parameter at the end of each step.

    Args:
        bucket: The gradients.

    Returns:
        A future of the bucket as it is.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp.register_comm_hook(None, dist.noop_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[dist.get_rank() + 1.0] * 2]  # not averaged
        ```
    """
    return unreduced(bucket)
