"""The records of one step of fully_shard in torch's profiler."""

from __future__ import annotations

import pytest
import torch

from dure import fsdp
from dure.fsdp import fully_shard
from dure.testing import run_ranks
from tests.profiles import names_in, profile_of, steps_of

GATHERED = [
    "FSDP::root_pre_forward",
    "FSDP::all_gather (0)",
    "c10d::_allgather_base_",
    "FSDP::pre_forward (0)",
    "FSDP::all_gather_copy_out (0)",
    "FSDP::all_gather (2)",
    "c10d::_allgather_base_",
    "FSDP::post_forward (0)",
    "FSDP::pre_forward (2)",
    "FSDP::all_gather_copy_out (2)",
    "FSDP::post_forward (2)",
    "FSDP::pre_backward (2)",
    "FSDP::all_gather (2)",
    "c10d::_allgather_base_",
    "FSDP::all_gather_copy_out (2)",
    "FSDP::all_gather (0)",
    "c10d::_allgather_base_",
    "FSDP::post_backward_reduce (2)",
    "c10d::_reduce_scatter_base_",
    "FSDP::post_backward_reshard (2)",
    "FSDP::pre_backward (0)",
    "FSDP::all_gather_copy_out (0)",
    "FSDP::root_post_backward_callback",
    "FSDP::post_backward_reduce (0)",
    "c10d::_reduce_scatter_base_",
    "FSDP::post_backward_reshard (0)",
    "FSDP::post_backward_rs_wait (2)",
    "FSDP::post_backward_rs_wait (0)",
    "Optimizer.step#SGD.step",
    "Optimizer.zero_grad#SGD.zero_grad",
]
"""With torch's FSDP2 the names are the same; it gathers the first module in that one's forward."""


@pytest.mark.parametrize("strategy", ["gathered", "shared"])
def test_gathers_and_reductions_are_recorded_as_in_torch(strategy):
    run_ranks(2, _step, strategy)


def _step(rank: int, strategy: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    with fsdp.strategy(strategy):
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    profile = profile_of(rank, steps_of(model))
    if rank:
        return
    others = "threads", "c10d::wait", "c10d::allreduce_"
    steps = [n for n in names_in(profile) if not n.startswith(others)]
    expected = GATHERED
    if strategy == "shared":  # nothing is gathered: ranks see the same memory
        expected = [n for n in expected if "all_gather (" not in n and "_allgather_" not in n]
    assert steps == expected
