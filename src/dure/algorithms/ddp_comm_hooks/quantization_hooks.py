"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook, quantization_pertensor_hook
)

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
