"""torch's path `torch.distributed.pipelining`: `from dure.pipelining import PipelineStage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.parallel.pipeline.cutting import StageCut, cut_by_cost, cut_into_stages, measured_costs
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
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from dure.parallel.pipeline.schedules import ScheduleForwardOnly as _ScheduleForwardOnly
from dure.parallel.pipeline.stage import PipelineStage
from dure.torch_names import lazy_names

__all__ = [
    "Pipe",
    "PipeInfo",
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

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.pipelining import microbatch as microbatch, schedules as schedules, stage as stage
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__)
