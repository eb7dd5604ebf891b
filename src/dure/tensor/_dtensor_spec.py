"""torch's path `torch.distributed.tensor._dtensor_spec`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.spec import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "TensorMeta"]
