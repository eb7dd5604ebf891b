"""torch's path `torch.distributed.optim.zero_redundancy_optimizer`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
