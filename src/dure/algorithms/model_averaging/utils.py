"""torch's path `torch.distributed.algorithms.model_averaging.utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.parallel.averaging.packing import (
    average_parameters, average_parameters_or_parameter_groups, get_params_to_average
)

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]
