"""torch's path `torch.distributed.algorithms.model_averaging.averagers`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.averaging.averagers import ModelAverager, PeriodicModelAverager

__all__ = ["ModelAverager", "PeriodicModelAverager"]
