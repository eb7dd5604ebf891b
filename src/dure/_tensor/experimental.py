"""torch's path `torch.distributed._tensor.experimental`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.experimental import (
    context_parallel, implicit_replication, local_map, register_sharding
)

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
