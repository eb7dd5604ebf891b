"""torch's path `torch.distributed.algorithms`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.training.join import Join, JoinHook, Joinable
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["Join", "JoinHook", "Joinable"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure.algorithms import (
        _checkpoint as _checkpoint, ddp_comm_hooks as ddp_comm_hooks, join as join,
        model_averaging as model_averaging
    )
