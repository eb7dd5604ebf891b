"""torch's path `torch.distributed.fsdp`: `from dure.fsdp import fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.parallel.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GroupLine,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Sharding,
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
from dure.torch_names import lazy_names
from dure.training.tokens import scale_by

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
    "scale_by",
    "share_comm_ctx",
    "strategy",
    "stream_full",
]

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.fsdp import _fully_shard as _fully_shard
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)
