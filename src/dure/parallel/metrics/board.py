"""Metrics for TensorBoard, which is an extra: ``pip install '.[tensorboard]'``.

One of two ways. Aggregated: every n-th step the ranks share their medians in one small all_gather,
and rank 0 writes the means. Per rank: each writes its own folder, ``rank0``, ``rank1``, ..., which
TensorBoard draws as lines of one chart, and nothing is communicated.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any
from weakref import finalize

from dure.comm.queries import get_rank, is_initialized
from dure.errors import UsageError
from dure.parallel.metrics.meter import StepMeter
from dure.parallel.metrics.split import StepReport, median_split

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes a meter's split, and what else a program gives, as TensorBoard scalars.

        with dure.TensorBoardWriter("runs/one", meter) as board:
            for images, labels in meter.batches(loader):
                ...
                board.write(loss=loss.item())

    Without `with`, call `close`; otherwise the file is closed when the object is freed, or at the
    end of the program. The scalars are those of `StepReport.scalars`: ``step/compute_s``,
    ``step/exposed_comm_s``, ``step/data_wait_s``, ``samples/s``, ...

    Args:
        log_dir: Where the event files come to lie; made if missing.
        meter: Measures the steps.
        every: Write at every so-many-th call.
        per_rank: Each rank writes a folder of its own.

    Raises:
        UsageError: TensorBoard is not installed, on a rank that has to write.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = dist.StepMeter(model, optimizer)
        with dist.TensorBoardWriter("runs/board", meter, every=1) as board:
            for batch in meter.batches([torch.ones(2, 4)] * 3):
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
                board.write(loss=loss.item())
        ```
    """

    def __init__(
        self,
        log_dir: Path | str,
        meter: StepMeter,
        *,
        every: int = 10,
        per_rank: bool = False,
    ) -> None:
        self._meter, self._every, self._per_rank = meter, max(1, every), per_rank
        self._num_calls = self._num_reported = 0
        rank = get_rank() if is_initialized() else 0
        folder = Path(log_dir) / f"rank{rank}" if per_rank else Path(log_dir)
        self._writer = _open(folder) if per_rank or rank == 0 else None
        self._end = finalize(self, _close, self._writer, os.getpid())

    def write(self, **scalars: float) -> None:
        """Count a step; at every n-th one, write the split of those since, and `scalars`.

        Collective:
            Where not per rank, all ranks of the meter's group.

        Cost:
            One all_gather of 8 numbers a rank at every n-th call; nothing at the others.
        """
        self._num_calls += 1
        if self._num_calls % self._every:
            return
        fresh = self._meter.num_steps - self._num_reported
        self._num_reported = self._meter.num_steps
        if self._per_rank:
            own = median_split(self._meter.steps(fresh))
            report = StepReport(ranks=(own,), num_steps=fresh)
        else:
            report = self._meter.report(fresh)
        if self._writer is None:
            return
        measured = report.scalars() if report.num_steps else {}
        for name, value in (measured | scalars).items():
            self._writer.add_scalar(name, value, self._num_calls)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer = None
        self._end()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(writer: Any, process: int) -> None:
    """Close the file, unless this is a forked child: the thread that writes is the parent's."""
    if writer is not None and os.getpid() == process:
        writer.close()


def _open(folder: Path) -> Any:
    """Make a SummaryWriter."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UsageError(
            "TensorBoard is not installed",
            seen=str(error),
            fix="Run `pip install '.[tensorboard]'` in the checkout of Dure.",
        ) from None
    return module.SummaryWriter(str(folder))
