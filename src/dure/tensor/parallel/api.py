"""torch's path `torch.distributed.tensor.parallel.api`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.parallel import parallelize_module

__all__ = ["parallelize_module"]
