"""torch's path `torch.distributed.constants`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.comm.creation import default_pg_timeout
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["default_pg_timeout"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
