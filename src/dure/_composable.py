"""torch's old path `torch.distributed._composable`, for programs moved over.

``dure._composable.fsdp`` is `dure.fsdp`.
"""

from __future__ import annotations

import sys

from dure import fsdp
from dure.fsdp import fully_shard
from dure.parallel.ddp import replicate as _replicate
from dure.parallel.ddp.replicate import replicate

__all__ = ["fully_shard", "replicate"]

sys.modules |= {f"{__name__}.fsdp": fsdp, f"{__name__}.replicate": _replicate}
