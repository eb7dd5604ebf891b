"""torch's path `torch.distributed.checkpoint.utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.errors import CheckpointException
from dure.checkpoint.default_plans import find_state_dict_object, find_tensor_shard

__all__ = ["CheckpointException", "find_state_dict_object", "find_tensor_shard"]
