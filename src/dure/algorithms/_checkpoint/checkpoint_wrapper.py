"""torch's path `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper, CheckpointImpl, CheckpointWrapper, OffloadWrapper, _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE, apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper
)

__all__ = [
    "ActivationWrapper", "CheckpointImpl", "CheckpointWrapper", "OffloadWrapper",
    "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"
]
