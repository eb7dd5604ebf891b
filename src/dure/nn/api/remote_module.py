"""torch's path `torch.distributed.nn.api.remote_module`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.rpc.remote_module import RemoteModule

__all__ = ["RemoteModule"]
