"""torch's path `torch.distributed.nn`: collectives that autograd understands, remote modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dure.nn import functional
from dure.nn.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from dure.torch_names import attribute

if TYPE_CHECKING:
    from dure.rpc.remote_module import RemoteModule

__all__ = [
    "RemoteModule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "functional",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __getattr__(name: str) -> Any:
    """Import RPC when its module is first used."""
    if name == "RemoteModule":
        return importlib.import_module("dure.rpc.remote_module").RemoteModule
    return attribute(__name__, name)
