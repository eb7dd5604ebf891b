"""torch's path `torch.distributed.algorithms.join`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.training.join import Join, JoinHook, Joinable

__all__ = ["Join", "JoinHook", "Joinable"]
