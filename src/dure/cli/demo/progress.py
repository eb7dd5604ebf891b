"""What the user sees while ranks train: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from dure.cli.demo.results import Run

__all__ = ["Watcher", "watcher"]

_REFRESH_S = 0.2
_LINES_A_RUN = 10


class Watcher(Protocol):
    """Shows runs as they advance; use it as a context manager."""

    def __enter__(self) -> Watcher:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Leave the screen as it is."""
        ...

    def begin(self, run: Run) -> None:
        """Show that `run`'s processes are being started."""
        ...

    def update(self, run: Run) -> None:
        """Show how far `run` has come; cheap enough to call after every event."""
        ...

    def end(self, run: Run) -> None:
        """Show `run` as finished."""
        ...


def watcher(console: Console) -> Watcher:
    """Return what suits the console: a bar on a terminal, plain lines elsewhere."""
    return _Bars(console) if console.is_terminal else _Lines(console)


class _Bars:
    """One bar a run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=1 / _REFRESH_S,
        )
        self._task: TaskID | None = None
        self._next_s = 0.0

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, run: Run) -> None:
        self._task = self._progress.add_task(run.name, total=None, state="starting")

    def update(self, run: Run) -> None:
        if time.monotonic() >= self._next_s:
            self._show(run)
            self._next_s = time.monotonic() + _REFRESH_S

    def end(self, run: Run) -> None:
        self._show(run)

    def _show(self, run: Run) -> None:
        if self._task is None or run.start is None or not run.points:
            return
        self._progress.update(
            self._task, total=run.start.steps, completed=len(run.points), state=_state(run)
        )


class _Lines:
    """A line at the beginning, and at every tenth of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, run: Run) -> None:
        self._shown = 0
        self._console.print(f"{run.name}: starting", highlight=False)

    def update(self, run: Run) -> None:
        if run.start is None or not run.points:
            return
        tenth = len(run.points) * _LINES_A_RUN // run.start.steps
        if tenth > self._shown:
            self._shown = tenth
            steps = f"step {len(run.points):,} of {run.start.steps:,}"
            self._console.print(
                f"{run.name}: {steps}, {_state(run)}", highlight=False, soft_wrap=True
            )

    def end(self, run: Run) -> None:
        pass


def _state(run: Run) -> str:
    """Say how a run does, short enough for a bar in 80 columns."""
    return (
        f"loss {run.points[-1].loss:.3f}, {run.images_per_s:,.0f} images/s, "
        f"{run.communication_share:.1%} in communication"
    )
