"""Distributed tensors: one tensor of which each rank of a mesh holds a part.

The names, arguments and meaning are those of `torch.distributed.tensor`. In addition, `explain`
prints the communication of a function with its reasons, and within `strict()` an operator without
a sharding rule raises instead of gathering its operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure import torch_private
from dure.mesh import DeviceMesh, init_device_mesh
from dure.tensor import debug, experimental, extension, random, rules, updates
from dure.tensor.clipping import clip_grad_norm_
from dure.tensor.distribute import distribute_module, distribute_tensor
from dure.tensor.dtensor import DTensor, safe_globals
from dure.tensor.factories import empty, full, ones, rand, randn, zeros
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.state import strictly as strict
from dure.tensor.watching import Explanation, Operation, explain
from dure.torch_names import lazy_names

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "Operation",
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

_REGISTERED = extension, rules, random, updates
"""Imported for what they register."""

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.tensor import (
        _api as _api, _collective_utils as _collective_utils, _dtensor_spec as _dtensor_spec,
        _random as _random, _utils as _utils, device_mesh as device_mesh, parallel as parallel,
        placement_types as placement_types,
    )
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)

# As torch.distributed.tensor does: `torch.load` loads DTensors, meshes and placements by default,
# and `torch.nn.utils.clip_grad_norm_` and optimizers treat DTensors in lists.
torch.serialization.add_safe_globals(safe_globals())
for _types in (torch_private.foreach_types_in_optimizers, torch_private.foreach_types_in_lists):
    if DTensor not in _types:
        _types.append(DTensor)  # pyright: ignore
