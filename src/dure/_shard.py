"""`torch.distributed._shard` has no equivalent; see docs/differences.md. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.torch_names import refuse

refuse(__name__)
