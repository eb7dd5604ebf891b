"""torch's old path `torch.distributed._tensor`, for programs moved over; see dure.tensor."""

from __future__ import annotations

import sys

from dure import device_mesh
from dure.tensor import *  # noqa: F403  # the same names
from dure.tensor import debug, experimental, placement_types

sys.modules |= {
    f"{__name__}.debug": debug,
    f"{__name__}.device_mesh": device_mesh,
    f"{__name__}.experimental": experimental,
    f"{__name__}.placement_types": placement_types,
}
