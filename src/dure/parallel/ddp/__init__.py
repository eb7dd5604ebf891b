"""Distributed data parallelism: replicas that see different data and step alike.

`module` holds the class users wrap their module in; `reducer` averages the gradients during
backward; `bucketing` plans which travel together, `buckets` is their memory; `replicas` keeps the
ranks' modules equal; `timing` and `report` say what a step spent where.
"""

from __future__ import annotations

from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.module import DistributedDataParallel
from dure.parallel.ddp.precision import MixedPrecision
from dure.parallel.ddp.timing import StepTimes

__all__ = ["DistributedDataParallel", "GradBucket", "MixedPrecision", "StepTimes"]
