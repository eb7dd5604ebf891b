"""Data parallelism in one process: a batch split over devices, or over threads on the CPU.

`module` holds `DataParallel` and `data_parallel`; a forward is `scatter`, `replicate`,
`parallel_apply`, `gather`, one file each except for the two that mirror each other. `random` gives
each thread its own random numbers. docs/mixed_precision.md says why
`DistributedDataParallel` is the better choice.
"""

from __future__ import annotations

from dure.parallel.dp.apply import parallel_apply
from dure.parallel.dp.module import DataParallel, data_parallel
from dure.parallel.dp.replicas import replicate
from dure.parallel.dp.splitting import gather, scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
