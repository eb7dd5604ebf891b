"""torch's path `torch.distributed.pipelining.schedules`."""

from __future__ import annotations

from dure.parallel.pipeline.base_schedule import (
    PipelineContext,
    PipelineSchedule,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)
from dure.parallel.pipeline.base_schedule import PipelineScheduleRuntime as _PipelineScheduleRuntime
from dure.parallel.pipeline.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from dure.parallel.pipeline.schedules import ScheduleForwardOnly as _ScheduleForwardOnly
from dure.schedules import Action as _Action
from dure.schedules import Kind as _ComputationType

__all__ = [
    "PipelineContext",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_Action",
    "_ComputationType",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "get_schedule_class",
]
