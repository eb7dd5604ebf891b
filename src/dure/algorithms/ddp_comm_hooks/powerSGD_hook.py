"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks.powerSGD_hook import (
    PowerSGDState, batched_powerSGD_hook, powerSGD_hook
)

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
