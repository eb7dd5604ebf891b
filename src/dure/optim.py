"""torch's path `torch.distributed.optim`, for programs moved over; see algorithms.py."""

from __future__ import annotations

import sys

from dure.parallel import optim as zero_redundancy_optimizer
from dure.parallel.averaging import PostLocalSGDOptimizer
from dure.parallel.averaging import post_local as post_localSGD_optimizer
from dure.parallel.optim import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

sys.modules |= {
    f"{__name__}.post_localSGD_optimizer": post_localSGD_optimizer,
    f"{__name__}.zero_redundancy_optimizer": zero_redundancy_optimizer,
}
