"""Optimizers whose work and state are divided over the ranks.

`zero` holds the class users take; `partition` says who updates what, `parameter_all_gather` how new
values get to the others (or how ranks that share one copy of the parameters wait for each other);
`states` brings the parts of the state together; `overlap` steps inside DDP's backward.
"""

from __future__ import annotations

from dure.parallel.optim.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from dure.parallel.optim.zero import ZeroRedundancyOptimizer

__all__ = [
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
