"""torch's path `torch.distributed.checkpoint.planner_helpers`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.default_plans import create_read_items_for_chunk_list

__all__ = ["create_read_items_for_chunk_list"]
