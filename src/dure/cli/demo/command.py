"""The command `dure demo`: one rank, then several, on the same images; a table and a report.

Both jobs are started by `run_job`, which is what `dure run` calls, and both run `train.py`. What
the user got wrong is a `UsageError`, found before anything is started wherever it can be.
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
from rich.table import Table

from dure.cli.demo.events import decode
from dure.cli.demo.machine import usable_cores
from dure.cli.demo.progress import Watcher, watcher
from dure.cli.demo.report import Ran, write_report
from dure.cli.demo.results import Run, comparison
from dure.data import read_idx_directory, require_digits
from dure.errors import UsageError
from dure.launch import JobResult, JobSpec, Line, run_job

__all__ = ["demo"]

_USER_ERRORS = {"UsageError", "DataError"}
_QUICK_IMAGES = 2400
_KEPT_LINES = 200


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
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run on fewer images.")] = False,
) -> None:
    """Train a small network on real images, with one process and with several, and compare."""
    console = Console()
    options = [
        *(["--data", str(data)] if data else []),
        *("--epochs", str(epochs or _default_epochs(data, quick))),
        *("--batch-size", str(batch_size), "--backend", backend, "--seed", str(seed)),
    ]
    command = shlex.join(["dure", "demo", "--ranks", str(ranks), *options, *_flags(quick)])
    report = out / "report.html"
    _check(data, ranks, batch_size, out)
    if ranks > usable_cores():
        console.print(f"Note: {ranks} ranks share {usable_cores()} core(s); expect no gain.")
    if quick:
        options += ["--images", str(_QUICK_IMAGES)]
    began = f"{datetime.now():%Y-%m-%d %H:%M}"
    with watcher(console) as watch:
        runs = [_train(n, batch_size, options, watch) for n in sorted({1, ranks})]
    _show(console, runs)
    write_report(report, runs, Ran(command=command, when=began))
    console.print(f"Report: {report}", soft_wrap=True, highlight=False)


def _default_epochs(data: Path | None, quick: bool) -> int:
    if data is not None:
        return 2
    return 6 if quick else 20


def _flags(quick: bool) -> list[str]:
    return ["--quick"] if quick else []


def _check(data: Path | None, ranks: int, batch_size: int, out: Path) -> None:
    """Make the report's directory; raise `UsageError` for whatever is known to fail later."""
    if batch_size % ranks:
        raise UsageError(
            "the ranks cannot share a batch equally",
            seen=f"--batch-size {batch_size}, --ranks {ranks}",
            fix=f"Try --batch-size {max(1, round(batch_size / ranks)) * ranks}.",
        )
    if data is None:
        require_digits()
    else:
        read_idx_directory(data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{out} cannot be the report's directory", seen=e.strerror or "") from e


def _train(ranks: int, batch_size: int, options: list[str], watch: Watcher) -> Run:
    """Run `train.py` on so many ranks; return what came of it, or leave with its exit code."""
    run = Run(ranks=ranks, batch_size=batch_size)
    other: deque[str] = deque(maxlen=_KEPT_LINES)

    def take(line: Line) -> None:
        text = line.text.decode(errors="replace")
        event = decode(text)
        if event is None:
            other.append(f"[{line.rank}] {text}")
        else:
            run.add(line.rank, event)
            watch.update(run)

    watch.begin(run)
    began = time.monotonic()
    result = run_job(
        JobSpec(
            program="dure.cli.demo.train",
            kind="module",
            args=(*options, "--events"),
            nproc=ranks,
            on_line=take,
            stdin="none",
            quiet=True,
        )
    )
    run.wall_s = time.monotonic() - began
    if not result.ok:
        _explain(result, list(other))
    watch.end(run)
    for line in other:
        print(line, file=sys.stderr)
    return run


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
    """Print the final table."""
    table = Table(title="The same training", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    if len(runs) > 1:
        table.add_column("gain", justify="right")
    for row in comparison(runs):
        table.add_row(row.label, *row.values, *([row.gain] if len(runs) > 1 else []))
    console.print(table)
