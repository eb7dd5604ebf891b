"""torch's path `torch.distributed.elastic.multiprocessing.errors`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.errorfile import record
from dure.errors import LaunchError as ChildFailedError
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["ChildFailedError", "record"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
