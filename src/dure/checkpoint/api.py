"""torch's path `torch.distributed.checkpoint.api`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.errors import CheckpointException

__all__ = ["CheckpointException"]
