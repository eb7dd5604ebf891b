"""Distributed data parallelism: replicas that see different data and step alike.

`module` holds the class users wrap their module in, `validation` what can be wrapped and what its
arguments mean. `reducer` averages the gradients during backward, bucket by bucket: `buckets` says
which gradients travel together and where they lie, `outcome` what ranks tell each other about a
step, `comm_hooks` how a program's own function reduces a bucket (`hooks` has some). `buffers` keeps
buffers alike, `join` lets ranks run out of inputs, `step_times` says what a step spent where, and
`torch_names` has what programs use of torch's class although its name begins with an underscore.
"""

from __future__ import annotations

from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.module import DistributedDataParallel
from dure.parallel.ddp.step_times import StepTimes

__all__ = ["DistributedDataParallel", "GradBucket", "StepTimes"]
