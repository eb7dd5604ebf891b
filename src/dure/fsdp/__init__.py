"""torch's path `torch.distributed.fsdp`: `from dure.fsdp import fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.parallel.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    explain,
    follow,
    full_parameters,
    fully_shard,
    join_step,
    offload,
    onload,
    register_fsdp_forward_method,
    share_comm_ctx,
    strategy,
    stream_full,
)
from dure.torch_names import getter
from dure.training.tokens import scale_by

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "explain",
    "follow",
    "full_parameters",
    "fully_shard",
    "join_step",
    "offload",
    "onload",
    "register_fsdp_forward_method",
    "scale_by",
    "share_comm_ctx",
    "strategy",
    "stream_full",
]

if not TYPE_CHECKING:
    __getattr__ = getter(__name__)
