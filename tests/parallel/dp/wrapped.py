"""A module wrapped in `DataParallel`, for tests."""

import warnings
from typing import Any

from torch import nn

import dure as dist


def parallel(module: nn.Module, device_ids: Any = 2, **more: Any) -> dist.DataParallel:
    """Wrap `module`, and swallow the advice to use DDP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return dist.DataParallel(module, device_ids, **more)
