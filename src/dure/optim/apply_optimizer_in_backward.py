"""torch's path `torch.distributed.optim.apply_optimizer_in_backward`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward, _get_in_backward_optimizers
)

__all__: list[str] = []
