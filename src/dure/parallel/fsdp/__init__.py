"""Fully sharded data parallel: parameters, gradients and optimizer state are divided over ranks.

fully_shard (fully_shard.py)   takes parameters (parameter.py), and puts them into groups (group.py)
state.py                       hooks: when a group is gathered, reduced, freed
strategy.py                    how: shared.py, gathered.py
"""

from __future__ import annotations

from dure.parallel.fsdp.choosing import strategy
from dure.parallel.fsdp.explain import GroupLine, Sharding, explain
from dure.parallel.fsdp.following import follow
from dure.parallel.fsdp.fully_shard import fully_shard, register_fsdp_forward_method
from dure.parallel.fsdp.module import FSDPModule, UnshardHandle, join_step, share_comm_ctx
from dure.parallel.fsdp.offloading import offload, onload
from dure.parallel.fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from dure.parallel.fsdp.weights import full_parameters, stream_full

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GroupLine",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Sharding",
    "UnshardHandle",
    "explain",
    "follow",
    "full_parameters",
    "fully_shard",
    "join_step",
    "offload",
    "onload",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "strategy",
    "stream_full",
]
