"""torch's path `torch.distributed._composable`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure._composable.checkpoint_activation import checkpoint
from dure._composable.replicate import replicate
from dure.fsdp import fully_shard
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["checkpoint", "fully_shard", "replicate"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure._composable import checkpoint_activation as checkpoint_activation, fsdp as fsdp
