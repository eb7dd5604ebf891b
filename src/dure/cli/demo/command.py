"""The command `dure demo`: one rank, then several (or DDP, then FSDP), on the same images.

Both jobs run `train`, a program like any, through `run_job`, as `dure run` does. What rank 0 prints
as JSON becomes a `Run` (`results`). Mistakes of the user are a `UsageError`, found before anything
is started if possible.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dure.cli.demo.results import Run, comparison, report
from dure.cli.machine import busy_cores, oversubscribed
from dure.data import read_idx_directory, require_digits
from dure.errors import UsageError
from dure.launch import JobResult, JobSpec, Line, run_job

_USER_ERRORS = {"UsageError", "DataError"}
_QUICK_IMAGES = 2400
_KEPT_LINES = 200
_FSDP_HIDDEN = 8  # layers: some 11 million parameters, instead of 0.27


def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of IDX files (MNIST, Fashion-MNIST), plain or .gz."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the second run.", min=1)] = 2,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the images; by default 20, with --data 2.", min=1),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Images per step, of all ranks together.", min=1)
    ] = 120,
    backend: Annotated[str, typer.Option(help="Backend of the gradients: shm or gloo.")] = "shm",
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of images.")] = 0,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Compare DDP with FSDP, on a larger network.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run on fewer images.")] = False,
) -> None:
    """Train a small network on real images, with one rank and with several, and compare.

    With --fsdp both runs have several: parameters are replicated in one, and sharded in the other.
    """
    if epochs is None:
        epochs = 2 if data else 6 if quick or fsdp else 20
    _check(data, ranks, batch_size, fsdp)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        reason = e.strerror or str(e)
        raise UsageError(f"{out} cannot be the report's directory", seen=reason) from e
    options = [
        *(["--data", str(data)] if data else []),
        *("--epochs", str(epochs), "--batch-size", str(batch_size)),
        *("--backend", backend, "--seed", str(seed)),
        *(["--hidden", str(_FSDP_HIDDEN)] if fsdp else []),
        *(["--images", str(_QUICK_IMAGES)] if quick else []),
    ]
    console = Console()
    if slow := oversubscribed(ranks, busy_cores()):
        console.print(f"Note: {slow}", highlight=False)
    ways = [(ranks, "DDP, "), (ranks, "FSDP, ")] if fsdp else [(n, "") for n in sorted({1, ranks})]
    runs = [
        Run(name=f"{way}{n} rank{'s' if n > 1 else ''}", ranks=n, batch_size=batch_size)
        for n, way in ways
    ]
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        for run in runs:
            _train(run, options + ["--fsdp"] * run.name.startswith("FSDP"), progress)
    _print_comparison(console, runs)
    path = out / "report.html"
    command = shlex.join(["dure", *sys.argv[1:]])
    path.write_text(report(runs, command, f"{datetime.now():%Y-%m-%d %H:%M}"), "utf-8")
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)


def _check(data: Path | None, ranks: int, batch_size: int, fsdp: bool) -> None:
    if batch_size % ranks:
        raise UsageError(
            "the ranks cannot share a batch equally",
            seen=f"--batch-size {batch_size}, --ranks {ranks}",
            fix=f"Try --batch-size {max(1, round(batch_size / ranks)) * ranks}.",
        )
    if fsdp and ranks < 2:
        raise UsageError("--fsdp needs at least two ranks", seen="--ranks 1")
    if data is None:
        require_digits()
    else:
        read_idx_directory(data)


def _train(run: Run, options: list[str], progress: Progress) -> None:
    """Run the program, and collect what it reports; exit with its code if it fails."""
    task = progress.add_task(run.name, total=None)
    other: deque[str] = deque(maxlen=_KEPT_LINES)

    def read(line: Line) -> None:
        text = line.text.decode(errors="replace")
        if text.startswith('{"dure demo": '):
            run.add(json.loads(text)["dure demo"])
            progress.update(task, total=run.facts["Steps"], completed=len(run.losses))
        else:
            other.append(f"[{line.rank}] {text}")

    result = run_job(
        JobSpec(
            program="dure.cli.demo.train",
            kind="module",
            args=(*options, "--events"),
            nproc=run.ranks,
            on_line=read,
            stdin="none",
            quiet=True,
        )
    )
    if not result.ok:
        _explain(result, list(other))
    for line in other:
        print(line, file=sys.stderr)


def _explain(result: JobResult, output: list[str]) -> None:
    """Print why a job failed, and exit with its code.

    Raises:
        UsageError: A rank reports a mistake of the user.
    """
    failure = result.first_failure
    if failure is None:  # interrupted: the user knows
        raise typer.Exit(result.exit_code)
    crash = failure.crash
    if crash is not None and crash.type.rpartition(".")[2] in _USER_ERRORS:
        raise UsageError(crash.message)
    reason = f"{crash.type}: {crash.message}" if crash else str(failure.exit)
    for line in (*output, f"dure demo: error: rank {failure.rank} failed: {reason}"):
        print(line, file=sys.stderr)
    raise typer.Exit(result.exit_code)


def _print_comparison(console: Console, runs: list[Run]) -> None:
    table = Table(title="The same training", title_justify="left")
    table.add_column("")
    for name in (*(run.name for run in runs), "gain"):
        table.add_column(name, justify="right")
    for row in comparison(runs):
        table.add_row(row.label, *row.values, row.gain)
    console.print(table)
