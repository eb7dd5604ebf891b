"""torch's path `torch.distributed.tensor.parallel.loss`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.tensor.parallel import loss_parallel

__all__ = ["loss_parallel"]
