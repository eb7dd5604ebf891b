"""torch's path `torch.distributed.checkpoint.default_planner`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.planner import DefaultLoadPlanner, DefaultSavePlanner
from dure.checkpoint.default_plans import (
    create_default_global_load_plan, create_default_global_save_plan,
    create_default_local_load_plan, create_default_local_save_plan
)
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = [
    "DefaultLoadPlanner", "DefaultSavePlanner", "create_default_global_load_plan",
    "create_default_global_save_plan", "create_default_local_load_plan",
    "create_default_local_save_plan"
]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
