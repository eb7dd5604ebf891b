"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.optim import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
