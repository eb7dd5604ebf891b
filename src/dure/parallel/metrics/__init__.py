"""Metrics of training: where a step's time goes, on each rank, as numbers and in TensorBoard.

`meter` measures, `split` holds the values, `board` writes them for TensorBoard.
"""

from __future__ import annotations

from dure.parallel.metrics.board import TensorBoardWriter
from dure.parallel.metrics.meter import StepMeter
from dure.parallel.metrics.split import StepReport, StepSplit

__all__ = ["StepMeter", "StepReport", "StepSplit", "TensorBoardWriter"]
