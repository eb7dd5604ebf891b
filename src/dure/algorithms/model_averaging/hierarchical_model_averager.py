"""torch's path `torch.distributed.algorithms.model_averaging.hierarchical_model_averager`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.averaging.averagers import HierarchicalModelAverager

__all__ = ["HierarchicalModelAverager"]
