"""torch's path `torch.distributed.pipelining.stage`."""

from __future__ import annotations

from dure.parallel.pipeline.exported import build_stage
from dure.parallel.pipeline.stage import PipelineStage

__all__ = ["PipelineStage", "build_stage"]
