"""torch's path `torch.distributed.elastic.utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.torch_names import TYPE_CHECKING, getter

__all__: list[str] = []

if not TYPE_CHECKING: __getattr__ = getter(__name__)
