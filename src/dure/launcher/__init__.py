"""torch's path `torch.distributed.launcher`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.launch.torch_launcher import LaunchConfig, elastic_launch
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["LaunchConfig", "elastic_launch"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure.launcher import api as api
