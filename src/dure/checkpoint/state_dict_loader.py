"""torch's path `torch.distributed.checkpoint.state_dict_loader`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.sharded import load, load_state_dict
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["load", "load_state_dict"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
