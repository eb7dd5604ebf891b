"""The hooks that average: what they send, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import Layers, gradients

FP16_AROUND = dist.fp16_compress_wrapper(dist.allreduce_hook)


HOOKS: dict[str, tuple[Callable[..., Any], float]] = {
    "allreduce": (dist.allreduce_hook, 4),
    "fp16": (dist.fp16_compress_hook, 2),
    "bf16": (dist.bf16_compress_hook, 2),
    "fp16 around": (FP16_AROUND, 2),
    "bf16 around": (dist.bf16_compress_wrapper(dist.allreduce_hook), 2),
    "noop": (dist.noop_hook, 0),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_send_as_many_bytes_as_they_say_3_ranks(name: str) -> None:
    hook, bytes_each = HOOKS[name]

    def rank_main(rank: int) -> list[torch.Tensor]:
        ddp = dist.DistributedDataParallel(Layers(3, 16), bucket_cap_mb=1e-6)
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((1, 16), rank + 1.0), 0, 1, 2).backward()
        with CommRecorder() as seen:
            ddp.zero_grad()
            ddp(torch.full((1, 16), rank + 1.0), 0, 1, 2).backward()
        bitmap = 4 * (3 + 1)
        assert seen.ops == ["all_reduce"] * (4 if bytes_each else 1)
        assert seen.nbytes() == 3 * 256 * bytes_each + bitmap
        return gradients(ddp)

    for rank, found in enumerate(run_ranks(3, rank_main)):
        expected = 2.0 if bytes_each else rank + 1.0
        assert all(torch.equal(g, torch.full((16, 16), expected)) for g in found)


def test_sparse_gradients_go_through_the_hooks_that_average_2_ranks() -> None:
    def rank_main(rank: int, hook: Any, state: Any) -> torch.Tensor:
        ddp = dist.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
        ddp.register_comm_hook(state, hook)
        ddp(torch.tensor([rank, 2])).sum().backward()
        gradient = ddp.module.weight.grad
        assert gradient.is_sparse
        return gradient.to_dense()[:, 0]

    power = dist.PowerSGDState(None, start_powerSGD_iter=0)
    hooks = [(dist.allreduce_hook, None), (dist.fp16_compress_hook, None)]
    for hook, state in [*hooks, (dist.powerSGD_hook, power)]:
        for found in run_ranks(2, rank_main, hook, state):
            assert found.tolist() == [0.5, 0.5, 1, 0]
