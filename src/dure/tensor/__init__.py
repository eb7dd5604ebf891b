"""Distributed tensors: one tensor of which each rank of a mesh holds a part."""

from __future__ import annotations

from dure.mesh import DeviceMesh, init_device_mesh
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.rules import creation, foreach, matmul, pointwise, reductions, views

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "init_device_mesh",
]

_FAMILIES = (creation, foreach, matmul, pointwise, reductions, views)
"""Their rules are registered when they are imported."""
