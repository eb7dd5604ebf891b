"""torch's path `torch.distributed._tensor.api`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor import (
    DTensor, DeviceMesh, Placement, Replicate, Shard, distribute_module, distribute_tensor
)

__all__ = [
    "DTensor", "DeviceMesh", "Placement", "Replicate", "Shard", "distribute_module",
    "distribute_tensor"
]
