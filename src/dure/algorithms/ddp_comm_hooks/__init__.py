"""torch's path `torch.distributed.algorithms.ddp_comm_hooks`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from dure.torch_names import TYPE_CHECKING, getter

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]

if not TYPE_CHECKING: __getattr__ = getter(__name__)
