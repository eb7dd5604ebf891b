"""torch's path `torch.distributed.checkpoint._traverse`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.checkpoint._traverse import get_element, set_element, traverse_state_dict

__all__ = ["get_element", "set_element", "traverse_state_dict"]
