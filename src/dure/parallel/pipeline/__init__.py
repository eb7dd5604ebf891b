"""Pipelines: a model cut into stages, whose ranks work on different microbatches at the same time.

One step, in the order of the files: `schedules.py` (torch's classes; cuts a batch, has the list of
actions), `executor.py` (carries it out), `stage.py` (forward and backward of a part), `messages.py`
and `slots.py` (hand over), `failures.py` (what if a stage raises). `exported.py` cuts a model by
torch.export.
"""

from __future__ import annotations

from dure.parallel.pipeline.cutting import (
    StageCut,
    cut_by_cost,
    cut_into_stages,
    measured_costs,
)
from dure.parallel.pipeline.executor import PipelineOptions
from dure.parallel.pipeline.exported import (
    Pipe,
    PipeInfo,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from dure.parallel.pipeline.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleForwardOnly,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from dure.parallel.pipeline.stage import PipelineStage

__all__ = [
    "Pipe",
    "PipeInfo",
    "PipelineOptions",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "StageCut",
    "build_stage",
    "cut_by_cost",
    "cut_into_stages",
    "measured_costs",
    "pipe_split",
    "pipeline",
]
