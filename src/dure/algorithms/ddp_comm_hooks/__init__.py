"""torch's path `torch.distributed.algorithms.ddp_comm_hooks`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure.algorithms.ddp_comm_hooks import (
        ddp_zero_hook as ddp_zero_hook, debugging_hooks as debugging_hooks,
        default_hooks as default_hooks, post_localSGD_hook as post_localSGD_hook,
        powerSGD_hook as powerSGD_hook, quantization_hooks as quantization_hooks
    )
