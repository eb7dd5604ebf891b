"""torch's path `torch.distributed._state_dict_utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed._state_dict_utils import (
    _copy_state_dict, _create_cpu_state_dict, _offload_state_dict_to_cpu
)

__all__: list[str] = []
