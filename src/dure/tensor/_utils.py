"""torch's path `torch.distributed.tensor._utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.spec import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]
