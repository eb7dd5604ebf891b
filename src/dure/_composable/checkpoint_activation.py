"""torch's path `torch.distributed._composable.checkpoint_activation`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed._composable.checkpoint_activation import checkpoint

__all__ = ["checkpoint"]
