"""torch's path `torch.distributed.optim.utils`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.optim.utils import as_functional_optim, register_functional_optim

__all__ = ["as_functional_optim", "register_functional_optim"]
