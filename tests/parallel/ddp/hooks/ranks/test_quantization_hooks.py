"""Gradients of eight bits: how far they are off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.parallel.ddp.hooks import DDPCommHookType, register_ddp_comm_hook
from dure.testing import CommRecorder, run_ranks


@pytest.mark.parametrize(
    ("kind", "sent"), [("QUANTIZE_PER_CHANNEL", 3 * (8 + 512)), ("QUANTIZE_PER_TENSOR", 8 + 1200)]
)
def test_eight_bits_are_off_by_half_a_level_at_most_3_ranks(kind: str, sent: int) -> None:
    def rank_main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ddp: Any = dist.DistributedDataParallel(nn.Linear(40, 30, bias=False))  # 1200 numbers
        register_ddp_comm_hook(DDPCommHookType[kind], ddp)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
        mean = x.sum(0).expand(30, 40).clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        with CommRecorder() as seen:
            ddp(x).sum().backward()
        assert seen.nbytes("all_gather_single") == sent
        return ddp.module.weight.grad, mean

    for found, mean in run_ranks(3, rank_main):
        assert (found - mean).abs().max() < 0.5 * 30 / 255
        assert not torch.equal(found, mean)
