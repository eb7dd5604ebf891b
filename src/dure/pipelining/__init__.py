"""torch's path `torch.distributed.pipelining`: `from dure.pipelining import PipelineStage`."""

from __future__ import annotations

from dure.parallel.pipeline import (
    Pipe,
    PipelineOptions,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    StageCut,
    build_stage,
    cut_by_cost,
    cut_into_stages,
    measured_costs,
    pipe_split,
    pipeline,
)
from dure.parallel.pipeline import ScheduleForwardOnly as _ScheduleForwardOnly

__all__ = [
    "Pipe",
    "PipelineOptions",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "StageCut",
    "_ScheduleForwardOnly",
    "build_stage",
    "cut_by_cost",
    "cut_into_stages",
    "measured_costs",
    "pipe_split",
    "pipeline",
]
