"""Distributed tensors: one tensor of which each rank of a mesh holds a part.

The names, arguments and meaning are those of `torch.distributed.tensor`; besides, `explain` prints
what a function communicates and why, and within `strict()` an operator that no rule knows raises
where it would gather.
"""

from __future__ import annotations

import sys

from dure import mesh
from dure.mesh import DeviceMesh, init_device_mesh
from dure.tensor import debug, experimental, random, rules, updates
from dure.tensor.clipping import clip_grad_norm_
from dure.tensor.distribute import distribute_module, distribute_tensor
from dure.tensor.dtensor import DTensor, safe_globals
from dure.tensor.factories import empty, full, ones, rand, randn, zeros
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.state import strictly as strict
from dure.tensor.watching import explain

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "clip_grad_norm_",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "experimental",
    "explain",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randn",
    "safe_globals",
    "strict",
    "zeros",
]

_REGISTERED = rules, random, updates
"""Imported for what they register."""

sys.modules[f"{__name__}.device_mesh"] = mesh  # torch's path
