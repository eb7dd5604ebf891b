"""torch's path `torch.distributed.optim`, for programs moved over; see algorithms.py."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dure.parallel import optim as zero_redundancy_optimizer
from dure.parallel.averaging import PostLocalSGDOptimizer
from dure.parallel.averaging import post_local as post_localSGD_optimizer
from dure.parallel.optim import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from dure.rpc.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

sys.modules |= {
    f"{__name__}.post_localSGD_optimizer": post_localSGD_optimizer,
    f"{__name__}.zero_redundancy_optimizer": zero_redundancy_optimizer,
}


def __getattr__(name: str) -> Any:
    """Import RPC when its optimizer is first used."""
    if name == "DistributedOptimizer":
        return importlib.import_module("dure.rpc.optimizer").DistributedOptimizer
    raise AttributeError(f"module 'dure.optim' has no attribute {name!r}")
