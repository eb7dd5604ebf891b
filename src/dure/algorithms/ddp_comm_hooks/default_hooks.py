"""torch's path `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.ddp.hooks.default_hooks import (
    allreduce_hook, bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook,
    fp16_compress_wrapper
)

__all__ = [
    "allreduce_hook", "bf16_compress_hook", "bf16_compress_wrapper", "fp16_compress_hook",
    "fp16_compress_wrapper"
]
