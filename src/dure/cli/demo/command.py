"""The command `dure demo`: one rank, then several (or DDP, then FSDP), on the same images.

Both jobs are started by `run_job`, which is what `dure run` calls, and both run `train`, a program
like any. `events` is what its ranks tell; `results` what it amounts to; `report` shows it.
What the user got wrong is a `UsageError`, found before anything is started wherever it can be.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from dure.cli.demo.events import decode
from dure.cli.demo.report import Ran, write_report
from dure.cli.demo.results import Run, comparison
from dure.cli.machine import busy_cores, oversubscribed
from dure.data import read_idx_directory, require_digits
from dure.errors import UsageError
from dure.launch import JobResult, JobSpec, Line, run_job

_USER_ERRORS = {"UsageError", "DataError"}
_QUICK_IMAGES = 2400
_KEPT_LINES = 200
_FSDP_HIDDEN = 8  # layers: some 11 million parameters, in place of 0.27


def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of IDX files (MNIST, Fashion-MNIST), plain or .gz."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes of the second run.", min=1)] = 2,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the images; by default 20, with --data 2.", min=1),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Images a step, all ranks together.", min=1)
    ] = 120,
    backend: Annotated[str, typer.Option(help="What moves the gradients: shm or gloo.")] = "shm",
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of images.")] = 0,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Compare DDP with FSDP, on a larger network.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run on fewer images.")] = False,
) -> None:
    """Train a small network on real images, with one process and with several, and compare.

    With --fsdp both runs have several: parameters are replicated in one, and sharded in the other.
    """
    if epochs is None:
        epochs = 2 if data else 6 if quick or fsdp else 20
    _check(data, ranks, batch_size, fsdp)
    report = _report_file(out)
    shared = [
        *(["--data", str(data)] if data else []),
        *("--epochs", str(epochs), "--batch-size", str(batch_size)),
        *("--backend", backend, "--seed", str(seed)),
    ]
    own = ["--ranks", str(ranks), "--out", str(out)]
    own += [*(["--fsdp"] if fsdp else []), *(["--quick"] if quick else [])]
    console, busy = Console(), busy_cores()
    if slow := oversubscribed(ranks, busy):
        console.print(f"Note: {slow}", highlight=False)
    ran = Ran(
        command=shlex.join(["dure", "demo", *shared, *own]),
        when=f"{datetime.now():%Y-%m-%d %H:%M}",
        busy_cores=busy,
    )
    ways = [(ranks, "DDP"), (ranks, "FSDP")] if fsdp else [(n, "") for n in sorted({1, ranks})]
    runs = [Run(ranks=number, batch_size=batch_size, way=way) for number, way in ways]
    shared += [
        *(["--hidden", str(_FSDP_HIDDEN)] if fsdp else []),
        *(["--images", str(_QUICK_IMAGES)] if quick else []),
    ]
    with _Screen(console) as screen:
        for run in runs:
            _train(run, shared, screen)
    _show(console, runs)
    write_report(report, runs, ran)
    console.print(f"Report: {report}", soft_wrap=True, highlight=False)


def _check(data: Path | None, ranks: int, batch_size: int, fsdp: bool) -> None:
    if batch_size % ranks:
        raise UsageError(
            "the ranks cannot share a batch equally",
            seen=f"--batch-size {batch_size}, --ranks {ranks}",
            fix=f"Try --batch-size {max(1, round(batch_size / ranks)) * ranks}.",
        )
    if fsdp and ranks < 2:
        raise UsageError(
            "there is nothing to shard among one rank", seen="--fsdp, --ranks 1", fix="Try 2."
        )
    if data is None:
        require_digits()
    else:
        read_idx_directory(data)


def _report_file(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        reason = e.strerror or str(e)
        raise UsageError(f"{directory} cannot be the report's directory", seen=reason) from e
    return directory / "report.html"


class _Screen(Progress):
    """Shows runs as they advance: a bar each on a terminal, ten lines each anywhere else."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._percent = 0

    def begin(self, run: Run) -> None:
        self._percent = 0
        self.add_task(run.name, total=None, state="starting")
        if self.disable:
            self.console.print(f"{run.name}: starting", highlight=False)

    def update_run(self, run: Run) -> None:
        """Show how far `run` has come; cheap enough to call after every event."""
        if run.start is None:
            return
        done, steps = len(run.points), run.start.steps
        before, self._percent = self._percent, done * 100 // steps
        if self._percent == before:
            return
        state = (  # short enough for a bar in 80 columns
            f"loss {run.points[-1].loss:.3f}, {run.images_per_s:,.0f} images/s, "
            f"{run.communication_share:.1%} in communication"
        )
        self.update(self.task_ids[-1], total=steps, completed=done, state=state)
        if self.disable and self._percent // 10 > before // 10:
            text = f"{run.name}: step {done:,} of {steps:,}, {state}"
            self.console.print(text, highlight=False, soft_wrap=True)


def _train(run: Run, options: list[str], screen: _Screen) -> None:
    """Run `train.py` as `run` says, which gets what came of it; leave with its exit code."""
    sharded = ["--fsdp"] if run.way == "FSDP" else []
    other: deque[str] = deque(maxlen=_KEPT_LINES)

    def take(line: Line) -> None:
        text = line.text.decode(errors="replace")
        event = decode(text)
        if event is None:
            other.append(f"[{line.rank}] {text}")
        else:
            run.add(line.rank, event)
            screen.update_run(run)

    screen.begin(run)
    began = time.monotonic()
    result = run_job(
        JobSpec(
            program="dure.cli.demo.train",
            kind="module",
            args=(*options, *sharded, "--events"),
            nproc=run.ranks,
            on_line=take,
            stdin="none",
            quiet=True,
        )
    )
    run.wall_s = time.monotonic() - began
    if not result.ok:
        _explain(result, list(other))
    for line in other:
        print(line, file=sys.stderr)


def _explain(result: JobResult, output: list[str]) -> None:
    """Say why a job failed, and leave with its exit code.

    Raises:
        UsageError: A rank says that the user is wrong.
    """
    failure = result.first_failure
    if failure is None:  # interrupted: the user knows
        raise typer.Exit(result.exit_code)
    crash = failure.crash
    if crash is not None and crash.type.rpartition(".")[2] in _USER_ERRORS:
        raise UsageError(crash.message)
    why = f"{crash.type}: {crash.message}" if crash else str(failure.exit)
    for line in (*output, f"dure demo: error: rank {failure.rank} failed: {why}"):
        print(line, file=sys.stderr)
    raise typer.Exit(result.exit_code)


def _show(console: Console, runs: list[Run]) -> None:
    table = Table(title="The same training", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    if len(runs) > 1:
        table.add_column("gain", justify="right")
    for row in comparison(runs):
        table.add_row(row.label, *row.values, *([row.gain] if len(runs) > 1 else []))
    console.print(table)
