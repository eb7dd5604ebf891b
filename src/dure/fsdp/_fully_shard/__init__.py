"""torch's path `torch.distributed.fsdp._fully_shard`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.fsdp import (
    CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, OffloadPolicy,
    UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
)
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy",
    "OffloadPolicy", "UnshardHandle", "fully_shard", "register_fsdp_forward_method",
    "share_comm_ctx"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure.fsdp._fully_shard import _fsdp_api as _fsdp_api, _fully_shard as _fully_shard
