"""torch's path `torch.distributed.optim.optimizer`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.rpc.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
