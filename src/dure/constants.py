"""torch's path `torch.distributed.constants`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.comm.creation import default_pg_timeout
from dure.torch_names import TYPE_CHECKING, getter

__all__ = ["default_pg_timeout"]

if not TYPE_CHECKING: __getattr__ = getter(__name__)
