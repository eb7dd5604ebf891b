"""Stages, schedules and batches that do not fit each other."""

from __future__ import annotations

import pytest
import torch

import dure
import dure.pipelining as pp
from dure.errors import ModuleError, ScheduleError, ShapeError, UsageError
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import CPU, batches, dense, mse


def _misfits(rank: int) -> None:
    parts = dense(2)
    x, y = batches(1)[0]
    stage = pp.PipelineStage(parts[rank], rank, 2, CPU)
    with pytest.raises(UsageError):
        pp.PipelineStage(parts[0], 2, 2, CPU)
    with pytest.raises(UsageError):
        pp.ScheduleZBVZeroBubble([stage], 4, loss_fn=mse)
    with pytest.raises(UsageError):
        pp.Schedule1F1B(pp.PipelineStage(parts[rank], 1 - rank, 2, CPU), 4, loss_fn=mse)
    schedule = pp.Schedule1F1B(stage, 12, loss_fn=mse)
    if rank == 0:
        with pytest.raises(ShapeError):
            schedule.step(x)  # 11 rows
    with pytest.raises(UsageError):
        schedule.step_microbatches([(x,)])
    schedule = pp.Schedule1F1B(stage, 4, loss_fn=mse)
    with torch.no_grad(), pytest.raises(ModuleError):
        schedule.step(x, target=y)
    dure.barrier()


def test_misfits_are_refused_on_2_ranks():
    run_ranks(2, _misfits)
    assert issubclass(ScheduleError, UsageError)
