"""Backward of stages: of checkpointed ones, and in two halves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure.pipelining as pp
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    SCHEDULES,
    Pipeline,
    Trained,
    batches,
    dense,
    mse,
    one_process,
    verify_same,
)


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def _of_checkpoints(rank: int, name: str, parts: list[nn.Module], reentrant: bool) -> Trained:
    pipeline = Pipeline(name, rank, 2, parts, 4, wrap=lambda part: Checkpointed(part, reentrant))
    return pipeline.train([(x.requires_grad_(), y) for x, y in batches(2)])


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_stages_train_as_others_on_2_ranks(name: str, reentrant: bool):
    parts = dense(2 * SCHEDULES[name][1])
    found = run_ranks(2, _of_checkpoints, name, parts, reentrant)
    verify_same(found, one_process(parts, batches(2), 4))


def _with_dw_builder(rank: int, parts: list[nn.Module]) -> int:
    calls: list[int] = []

    def later() -> Any:
        return lambda: calls.append(1)

    stage = pp.PipelineStage(copy.deepcopy(parts[rank]), rank, 2, CPU, dw_builder=later)
    schedule = pp.ScheduleInterleavedZeroBubble([stage], 4, loss_fn=mse)
    x, y = batches(1)[0]
    schedule.step(*([x] if rank == 0 else []), target=y)
    return len(calls)


def test_dw_builder_is_called_once_per_microbatch_on_2_ranks():
    assert run_ranks(2, _with_dw_builder, dense(2)) == [4, 4]
