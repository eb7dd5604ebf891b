"""Distributed data parallelism: replicas that see different data and step alike.

`module` holds the class users wrap their module in, `arguments` what its arguments mean,
`wrapping` what can be wrapped. `reducer` averages the gradients during backward: `bucketing` plans
which travel together, `arrangement` keeps the plan, `slots` and `buckets` are the memory, `ledger`
and `verdicts` what ranks tell each other about a step, `graphs` what autograd is asked. `replicas`
keeps the ranks' modules equal, `joining` lets ranks run out of inputs, `hooking` runs communication
hooks, `precision` and `casting` use fewer bits, `compiling` keeps torch.compile where it belongs;
`timing`, `telling` and `report` say what a step spent where.
"""

from __future__ import annotations

from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.module import DistributedDataParallel
from dure.parallel.ddp.precision import MixedPrecision
from dure.parallel.ddp.timing import StepTimes

__all__ = ["DistributedDataParallel", "GradBucket", "MixedPrecision", "StepTimes"]
