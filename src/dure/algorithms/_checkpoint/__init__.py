"""torch's path `torch.distributed.algorithms._checkpoint`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__: list[str] = []

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
else:
    from dure.algorithms._checkpoint import checkpoint_wrapper as checkpoint_wrapper
