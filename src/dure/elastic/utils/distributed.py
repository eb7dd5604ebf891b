"""torch's path `torch.distributed.elastic.utils.distributed`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.elastic.utils.distributed import get_free_port
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["get_free_port"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
