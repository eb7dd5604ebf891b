"""torch's path `torch.distributed.algorithms`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.training.join import Join, JoinHook, Joinable
from dure.torch_names import TYPE_CHECKING, getter

__all__ = ["Join", "JoinHook", "Joinable"]

if not TYPE_CHECKING: __getattr__ = getter(__name__)
