"""The functions that torch calls to make a group of the backend "dure"."""

from __future__ import annotations

import atexit
import sys
import warnings
from typing import Any

import torch.distributed

from dure.errors import UsageWarning, derive_from
from dure.torch_backend import NAME
from dure.torch_backend.engine import GroupRequest
from dure.torch_backend.group import TorchGroup, make
from dure.torch_backend.identity import live_groups

__all__ = ["create"]

derive_from(torch.distributed)


def create(options: Any, backend_options: object = None, name: str = NAME) -> TorchGroup:
    """Make this rank's side of the group that torch describes.

    Args:
        options: Torch's `_DistributedBackendOptions`; an empty list of ranks is the default group.
        backend_options: The program's `pg_options`.
        name: Name of the backend, for torch and its clients.

    Raises:
        RendezvousTimeout: Ranks did not arrive; `missing` has them.
        RendezvousError: The ranks of a host cannot share memory.
        Desync: The ranks do not agree on the group.
    """
    request = GroupRequest(
        store=options.store,
        rank=options.group_rank,
        global_ranks=tuple(options.global_ranks_in_group or range(options.group_size)),
        timeout=options.timeout,
        name=options.group_id or "",
        pg_options=backend_options,
    )
    if name == NAME and "ignite.distributed" in sys.modules:
        warnings.warn(
            'ignite.distributed.auto_model does not wrap models of a "dure" group, so ranks would '
            'train apart. Use "gloo" after dure.torch_backend.stand_in("gloo"), or wrap the model '
            "in DistributedDataParallel.",
            UsageWarning,
            stacklevel=2,
        )
    return make(request, name)


@atexit.register
def _leave_all() -> None:
    for group in list(live_groups):
        group.leave_at_exit()
