"""Distributed data parallelism: replicas that see different data and make the same steps.

`module` holds the class users wrap their module in, `validation` what can be wrapped and what its
arguments mean. `reducer` averages the gradients during backward, bucket by bucket: `buckets` says
which gradients are reduced together and where they are stored, `outcome` what ranks report about a
step, `comm_hooks` how a program's own function reduces a bucket (`hooks` has some). `buffers` keeps
buffers equal, `join` lets ranks run out of inputs, `step_times` measures the phases of a step, and
`torch_names` has what programs use of torch's class although its name begins with an underscore.
"""

from __future__ import annotations

from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.module import DistributedDataParallel
from dure.training.module_times import StepTimes

__all__ = ["DistributedDataParallel", "GradBucket", "StepTimes"]
