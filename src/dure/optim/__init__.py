"""torch's path `torch.distributed.optim`, for programs moved over."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dure.parallel.averaging import PostLocalSGDOptimizer
from dure.parallel.optim import ZeroRedundancyOptimizer
from dure.torch_names import attribute

if TYPE_CHECKING:
    from dure.rpc.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

_RARELY_USED = {
    "DistributedOptimizer": "dure.rpc.optimizer",
    "as_functional_optim": "dure.optim.utils",
    "_apply_optimizer_in_backward": "dure.optim.apply_optimizer_in_backward",
    "_get_in_backward_optimizers": "dure.optim.apply_optimizer_in_backward",
}


def __getattr__(name: str) -> Any:
    """Import what is rarely used, such as RPC's optimizer, on its first use."""
    if name in _RARELY_USED:
        return getattr(importlib.import_module(_RARELY_USED[name]), name)
    return attribute(__name__, name)
