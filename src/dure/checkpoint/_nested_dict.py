"""torch's path `torch.distributed.checkpoint._nested_dict`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

__all__ = ["flatten_state_dict", "unflatten_state_dict"]
