"""torch's path `torch.distributed._tensor`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor import (
    DTensor, DeviceMesh, Partial, Placement, Replicate, Shard, distribute_module,
    distribute_tensor, empty, full, init_device_mesh, ones, rand, randn, zeros
)
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "distribute_module",
    "distribute_tensor", "empty", "full", "init_device_mesh", "ones", "rand", "randn", "zeros"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure._tensor import (
        _utils as _utils, api as api, debug as debug, device_mesh as device_mesh,
        experimental as experimental, placement_types as placement_types
    )
