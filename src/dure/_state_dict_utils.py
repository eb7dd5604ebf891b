"""torch's path `torch.distributed._state_dict_utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed._state_dict_utils import _copy_state_dict, _offload_state_dict_to_cpu
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__: list[str] = []

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
