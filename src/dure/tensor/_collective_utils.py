"""torch's path `torch.distributed.tensor._collective_utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.mesh_collectives import mesh_broadcast, mesh_scatter, shard_dim_alltoall
from dure.tensor.placement_types import pad_tensor, unpad_tensor

__all__ = ["mesh_broadcast", "mesh_scatter", "pad_tensor", "shard_dim_alltoall", "unpad_tensor"]
