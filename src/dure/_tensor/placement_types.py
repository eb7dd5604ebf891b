"""torch's path `torch.distributed._tensor.placement_types`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.spec import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "Partial", "Placement", "Replicate", "Shard", "TensorMeta"]
