"""torch's path `torch.distributed._symmetric_memory`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.symmetric_memory import empty, is_symm_mem_tensor, rendezvous
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["empty", "is_symm_mem_tensor", "rendezvous"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
