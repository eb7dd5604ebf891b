"""torch's path `torch.distributed.nn`: collectives that autograd understands, remote modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from dure.torch_names import lazy_names

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

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.rpc.remote_module": ("RemoteModule",),
}

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.nn import api as api, experts as experts
    from dure.rpc.remote_module import RemoteModule
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
