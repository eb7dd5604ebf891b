"""torch's path `torch.distributed.remote_device`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.remote_device import _remote_device

__all__: list[str] = []
