"""torch's path `torch.distributed.launcher`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.launch.torch_launcher import LaunchConfig, elastic_launch
from dure.torch_names import TYPE_CHECKING, getter

__all__ = ["LaunchConfig", "elastic_launch"]

if not TYPE_CHECKING: __getattr__ = getter(__name__)
