"""Post-local SGD's part in DDP: gradients are averaged over all ranks first, then in the host only.

Afterwards only models cross the hosts, averaged every few steps by an averager (see
`dure.parallel.averaging`): a factor of the period less between hosts, for replicas that differ in
between.

Source: Lin et al., Don't use large mini-batches, use local SGD, https://arxiv.org/abs/1808.07217.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.comm.subgroups import new_subgroups
from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.hooks.default_hooks import average, unreduced

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState:
    """When gradients stop to cross the hosts, and where they go then.

    Args:
        process_group: The ranks of the first steps; those of the DDP module by default.
        subgroup: The ranks of the later steps; those of this host by default.
        start_localSGD_iter: Steps before that; an averager's ``warmup_steps`` must be the same.
        post_local_gradient_allreduce: False: gradients stay on each rank then.

    Attributes:
        iter: Steps so far.

    Collective:
        Construction without `subgroup` makes groups; all ranks of the job.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        state = dist.PostLocalSGDState(None, None, start_localSGD_iter=100)
        model.register_comm_hook(state, dist.post_localSGD_hook)
        ```
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if subgroup is None and post_local_gradient_allreduce:
            subgroup, _ = new_subgroups()
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its last bucket."""
        self.iter += bucket.is_last()


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over all ranks in the first steps, within the subgroup afterwards.

    Args:
        state: When the first steps end.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        S bytes, one all_reduce a bucket, over the group whose turn it is.

    Example:
        ```python
        from dure.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )

        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        state = PostLocalSGDState(None, subgroup=None, start_localSGD_iter=10)
        ddp.register_comm_hook(state, post_localSGD_hook)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]  # one of the first 10 steps
        ```
    """
    early = state.iter < state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if early:
        return average(state.process_group or bucket.group, bucket.buffer())
    if state.subgroup is not None and state.post_local_gradient_allreduce:
        return average(state.subgroup, bucket.buffer())
    return unreduced(bucket)
