"""torch's path `torch.distributed.utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure import _sync_module_states, _verify_param_shape_across_processes

__all__: list[str] = []
