"""torch's old path `torch.distributed._tensor`, for programs moved over; see dure.tensor."""

from __future__ import annotations

import sys

from dure import device_mesh
from dure.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    debug,
    distribute_module,
    distribute_tensor,
    empty,
    experimental,
    full,
    init_device_mesh,
    ones,
    placement_types,
    rand,
    randn,
    zeros,
)

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randn",
    "zeros",
]

sys.modules |= {
    f"{__name__}.debug": debug,
    f"{__name__}.device_mesh": device_mesh,
    f"{__name__}.experimental": experimental,
    f"{__name__}.placement_types": placement_types,
}
