"""A hook that sends nothing, to measure what communication costs."""

from __future__ import annotations

from typing import Any

import torch

from dure.parallel.ddp.buckets import GradBucket

__all__ = ["noop_hook"]


def noop_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave the gradients as they are on this rank: the ranks' models will differ.

    The step time with this hook is what a step would take if communication were free. DDP itself
    still exchanges one number a parameter at the end of each step.
    """
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
