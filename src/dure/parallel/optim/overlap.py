"""The update inside backward: a communication hook of DDP that also steps the optimizer.

DDP hands its hook one bucket of gradients after another, while backward computes the next ones. As
soon as a bucket is reduced, the parameters it belongs to can be updated, since nothing of this
backward needs them any more: a gradient is complete only when all that used the parameter has been
gone through. Two orders:

*Step at the end* (`hook_with_zero_step`): when the last bucket is on its way, the buckets are
updated in their order, each as soon as it is reduced, while the later ones are still travelling.

*Interleaved* (`hook_with_zero_step_interleaved`): when bucket k is handed over, bucket k - 1 is
waited for and updated, in the midst of backward: its reduction had the time that the gradients of
bucket k took to compute.

All ranks start their collectives at the same points of this order, independent of what is ready.
The new values are sent bucket by bucket, or, with ``host_shared_parameters=True``, not at all: then
one barrier at the end shows that all ranks have updated their shards. Before backward returns, all
parameters are new on all ranks.

The owner of a parameter is decided when the optimizer is made and does not depend on buckets, so
the very first backward updates (torch's hooks skip two or three steps), and DDP may change its
buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.errors import CommError, OptimizerError
from dure.parallel.optim.parameter_all_gather import explain
from dure.parallel.optim.zero import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["GradBucketLike", "Hook", "hook_with_zero_step", "hook_with_zero_step_interleaved"]


class GradBucketLike(Protocol):
    """A bucket of gradients, as DDP hands it to its hook (`dure.GradBucket`)."""

    def index(self) -> int:
        """Return its place in the order of reduction."""
        ...

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one flat tensor."""
        ...

    def gradients(self) -> Sequence[torch.Tensor]:
        """Return them in the shapes of their parameters."""
        ...

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters."""
        ...

    def is_last(self) -> bool:
        """Tell whether it is the last of this backward."""
        ...


class Wrapped(Protocol):
    """The module that averages the gradients: all that is known of it."""

    process_group: ProcessGroup


Hook = Callable[[Any, Any], torch.futures.Future[Any]]
"""`hook(state, bucket)`."""


def hook_with_zero_step(
    hook: Hook, ddp: Wrapped, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Make a communication hook that reduces as `hook` does and steps `zero` at backward's end.

        ddp.register_comm_hook(None, hook_with_zero_step(hook, ddp, optimizer))

    Every parameter in DDP's buckets is updated in every synchronised backward, also one that no
    rank used (its gradient counts as zero). Options are those the optimizer has at that moment; a
    scheduler acts after backward, as it would after `step`.

    Args:
        hook: Averages a bucket.
        ddp: The module it is registered with, on the optimizer's group.
        zero: Made with ``overlap_with_ddp=True``, over the parameters of `ddp`.
        shard_buckets: Accepted for compatibility: shards never depend on buckets.

    Returns:
        A hook for `register_comm_hook`, whose state is None.

    Raises:
        OptimizerError: `zero` was made without overlap, or on another group; from backward: a
            parameter of `zero` is in no bucket.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        zero = dist.optim.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, lr=1.0, overlap_with_ddp=True
        )
        ddp.register_comm_hook(None, dist.hook_with_zero_step(dist.allreduce_hook, ddp, zero))
        before = ddp.module.weight.detach().clone()
        ddp(torch.ones(1, 2)).sum().backward()  # steps as well
        assert torch.allclose(ddp.module.weight, before - 1.0)
        ```
    """
    del shard_buckets
    stepper = _Stepper(hook, ddp, zero)

    def step_at_the_end(state: Any, bucket: GradBucketLike) -> torch.futures.Future[Any]:
        return stepper.take(state, bucket, interleaved=False)

    return step_at_the_end


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Wrapped, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Make a communication hook that steps `zero` in the midst of backward.

    As `hook_with_zero_step`, for when reductions are fast compared with backward.

    Args:
        hook: Averages a bucket.
        ddp: The module it is registered with, on the optimizer's group.
        zero: Made with ``overlap_with_ddp=True``, over the parameters of `ddp`.
        shard_buckets: Accepted for compatibility: shards never depend on buckets.

    Returns:
        A hook for `register_comm_hook`, whose state is None.

    Raises:
        OptimizerError: As `hook_with_zero_step`.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        zero = dist.optim.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, lr=1.0, overlap_with_ddp=True
        )
        hook = dist.hook_with_zero_step_interleaved(dist.allreduce_hook, ddp, zero)
        ddp.register_comm_hook(None, hook)
        before = ddp.module.weight.detach().clone()
        ddp(torch.ones(1, 2)).sum().backward()
        assert torch.allclose(ddp.module.weight, before - 1.0)
        ```
    """
    del shard_buckets
    stepper = _Stepper(hook, ddp, zero)

    def step_interleaved(state: Any, bucket: GradBucketLike) -> torch.futures.Future[Any]:
        return stepper.take(state, bucket, interleaved=True)

    return step_interleaved


class _Stepper:
    """Updates bucket by bucket; see the module's text.

    Threads:
        Called by the thread that runs backward, for one bucket after another.
    """

    def __init__(self, hook: Hook, ddp: Wrapped, zero: ZeroRedundancyOptimizer) -> None:
        if not zero.overlap_with_ddp:
            raise OptimizerError(
                "the optimizer was not made to step inside backward",
                fix="Pass overlap_with_ddp=True to ZeroRedundancyOptimizer.",
            )
        if ddp.process_group is not zero.process_group:
            raise OptimizerError(
                "the optimizer and the module are on different process groups",
                seen=f"{zero.process_group.group_name!r} and {ddp.process_group.group_name!r}",
            )
        self._hook, self._zero = hook, zero
        self._pending: list[tuple[GradBucketLike, torch.futures.Future[Any]]] = []
        self._updated: set[torch.Tensor] = set()

    def take(
        self, state: Any, bucket: GradBucketLike, interleaved: bool
    ) -> torch.futures.Future[Any]:
        """Reduce a bucket, and update those that are due."""
        if bucket.index() == 0:
            self._pending, self._updated = [], set()
            self._refuse_hooks_before_steps()
        due = len(self._pending) if interleaved else 0
        reduced = self._hook(state, bucket)
        self._pending.append((bucket, reduced))
        try:
            self._update(len(self._pending) if bucket.is_last() else due)
            if bucket.is_last():
                self._zero.finish_overlapped(self._updated)
        except CommError as error:
            explain(error)
            raise
        return reduced

    def _refuse_hooks_before_steps(self) -> None:
        """Raise if the program has hooks that are to run before updates: `step` comes after."""
        if self._zero._optimizer_step_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            raise OptimizerError(
                "a hook that runs before a step would run after it: updates happen in backward",
                seen="register_step_pre_hook on an optimizer with overlap_with_ddp=True",
                fix="Register it on zero.optim, where it runs before each bucket's update, or do "
                "not overlap.",
            )

    def _update(self, count: int) -> None:
        """Update the parameters of the first `count` pending buckets."""
        for bucket, reduced in self._pending[:count]:
            result = reduced.wait()
            _copy_back(bucket, result if isinstance(result, torch.Tensor) else result[0])
            parameters = bucket.parameters()
            with _gradients(parameters, bucket.gradients()):
                self._zero.update_overlapped(parameters)
            self._updated.update(parameters)
        del self._pending[:count]


def _copy_back(bucket: GradBucketLike, result: torch.Tensor) -> None:
    """Put what the hook made of a bucket where its gradients are, if it is elsewhere."""
    buffer = bucket.buffer()
    if result.data_ptr() != buffer.data_ptr() or not result.is_contiguous():
        with torch.no_grad():
            buffer.copy_(result.detach().reshape(-1))


@contextmanager
def _gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let `parameters` have these gradients for a while."""
    before = [p.grad for p in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach().to(parameter.dtype)
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
