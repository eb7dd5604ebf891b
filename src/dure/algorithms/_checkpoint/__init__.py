"""torch's path `torch.distributed.algorithms._checkpoint`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.torch_names import getter

__all__: list[str] = []

__getattr__ = getter(__name__)
