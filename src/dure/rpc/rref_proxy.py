"""torch's path `torch.distributed.rpc.rref_proxy`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.rpc.rref import RRefProxy

__all__ = ["RRefProxy"]
