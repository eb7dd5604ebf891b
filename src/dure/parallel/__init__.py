"""Ways to train one model on several ranks; the packages know nothing of each other.

Internal: its public names are those of `dure`, `dure.fsdp` and `dure.pipelining`.
"""

from __future__ import annotations

from dure.parallel.ddp import DistributedDataParallel, GradBucket

__all__ = ["DistributedDataParallel", "GradBucket"]
