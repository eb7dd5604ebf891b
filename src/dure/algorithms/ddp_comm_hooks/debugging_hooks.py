"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks.default_hooks import noop_hook

__all__ = ["noop_hook"]
