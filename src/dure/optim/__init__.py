"""torch's path `torch.distributed.optim`, for programs moved over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.parallel.averaging import PostLocalSGDOptimizer
from dure.parallel.optim import ZeroRedundancyOptimizer
from dure.torch_names import lazy_names

__all__ = ["DistributedOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.rpc.optimizer": ("DistributedOptimizer",),
    "dure.optim.utils": ("as_functional_optim",),
    "dure.optim.apply_optimizer_in_backward": (
        "_apply_optimizer_in_backward",
        "_get_in_backward_optimizers",
    ),
}

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.optim import (
        apply_optimizer_in_backward as apply_optimizer_in_backward, optimizer as optimizer,
        post_localSGD_optimizer as post_localSGD_optimizer, utils as utils,
        zero_redundancy_optimizer as zero_redundancy_optimizer,
    )
    from dure.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward as _apply_optimizer_in_backward,  # pyright: ignore[reportPrivateUsage]
        _get_in_backward_optimizers as _get_in_backward_optimizers,  # pyright: ignore[reportPrivateUsage]
    )
    from dure.optim.utils import as_functional_optim as as_functional_optim
    from dure.rpc.optimizer import DistributedOptimizer
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
