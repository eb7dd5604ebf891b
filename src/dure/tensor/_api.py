"""torch's path `torch.distributed.tensor._api`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor import (
    DTensor, distribute_module, distribute_tensor, empty, full, ones, rand, randn, zeros
)
from dure.tensor.distribute import _shard_tensor

__all__ = [
    "DTensor", "distribute_module", "distribute_tensor", "empty", "full", "ones", "rand", "randn",
    "zeros"
]
