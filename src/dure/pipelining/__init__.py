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
    build_stage,
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
    "_ScheduleForwardOnly",
    "build_stage",
    "pipe_split",
    "pipeline",
]
