"""Tensor parallelism: plans of styles, under the names of torch.distributed.tensor.parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.tensor.parallel.experts import ExpertParallel
from dure.tensor.parallel.plan import parallelize_module
from dure.tensor.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from dure.tensor.state import replicating as loss_parallel
from dure.torch_names import lazy_names

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.tensor.parallel import (
        api as api, input_reshard as input_reshard, loss as loss, style as style,
    )
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)
