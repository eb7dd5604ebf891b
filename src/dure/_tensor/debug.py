"""torch's path `torch.distributed._tensor.debug`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.debug import CommDebugMode, visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
