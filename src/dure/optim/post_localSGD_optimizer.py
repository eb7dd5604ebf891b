"""torch's path `torch.distributed.optim.post_localSGD_optimizer`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.averaging import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
