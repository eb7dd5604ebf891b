"""torch's path `torch.distributed._composable.replicate`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.replicate import DDP, replicate

__all__ = ["DDP", "replicate"]
