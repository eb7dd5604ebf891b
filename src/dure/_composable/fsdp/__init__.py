"""torch's path `torch.distributed._composable.fsdp`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle,
    register_fsdp_forward_method
)
from dure._composable.fsdp.fully_shard import fully_shard
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "fully_shard", "register_fsdp_forward_method"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
