"""torch's path `torch.distributed.fsdp`: `from dure.fsdp import fully_shard`."""

from __future__ import annotations

from dure.parallel.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    explain,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    strategy,
)
from dure.training.tokens import scale_by

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "explain",
    "fully_shard",
    "register_fsdp_forward_method",
    "scale_by",
    "share_comm_ctx",
    "strategy",
]
