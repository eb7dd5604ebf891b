"""The records of one step of DDP in torch's profiler."""

from __future__ import annotations

import torch

from dure.parallel.ddp import DistributedDataParallel
from tests.profiles import names_in, profile_of, steps_of
from tests.thread_ranks import on_ranks


@on_ranks(2)
def test_forward_and_buckets_are_recorded(rank):
    layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0002)
    profile = profile_of(rank, steps_of(model))
    if rank == 0:
        names = names_in(profile)
        assert names.count("c10d::allreduce_") == 2
        # The last bucket is reduced at once if the other one has been.
        assert [n for n in names if n.startswith(("Distributed", "Optimizer"))] == [
            "DistributedDataParallel.forward",
            "DistributedDataParallel.reduce_bucket (0)",
            "DistributedDataParallel.reduce_bucket (1)",
            "DistributedDataParallel.wait_for_buckets",
            "Optimizer.step#SGD.step",
            "Optimizer.zero_grad#SGD.zero_grad",
        ]
