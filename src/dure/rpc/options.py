"""torch's path `torch.distributed.rpc.options`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.rpc.backend_registry import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]
