"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
