"""The command `dure demo`: one rank, then several, on the same images.

Both jobs run `train`; rank 0's report becomes a `Run` (`results`). Mistakes of the user are a
`UsageError`, found before anything is started if possible.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dure.cli.demo.results import Run, report, table
from dure.cli.machine import busy_cores, oversubscribed
from dure.cli.ranks import run_ranks
from dure.data import read_idx_directory, require_digits
from dure.errors import UsageError

_QUICK_IMAGES = 2400


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
    backend: Annotated[Literal["shm", "gloo"], typer.Option(help="Of the gradients.")] = "shm",
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of images.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run on fewer images.")] = False,
) -> None:
    """Train a small network on real images, with one rank and with several, and compare."""
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
        reason = e.strerror or str(e)
        raise UsageError(f"{out} cannot be the report's directory", seen=reason) from e
    epochs = epochs or (2 if data else 6 if quick else 20)
    options = ["--epochs", str(epochs), "--batch-size", str(batch_size)]
    options += ["--backend", backend, "--seed", str(seed)]
    options += ["--data", str(data)] if data else []
    options += ["--images", str(_QUICK_IMAGES)] if quick else []
    console = Console()
    if slow := oversubscribed(ranks, busy_cores()):
        console.print(f"Note: {slow}", highlight=False)
    runs = [Run(ranks=n, batch_size=batch_size) for n in sorted({1, ranks})]
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        for run in runs:
            _train(run, options, progress)
    console.print(table(runs))
    path = out / "report.html"
    try:
        path.write_text(report(runs, shlex.join(["dure", *sys.argv[1:]])), "utf-8")
    except OSError as e:
        raise UsageError(f"{path} cannot be written", seen=e.strerror or str(e)) from e
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)


def _train(run: Run, options: list[str], progress: Progress) -> None:
    task = progress.add_task(run.name, total=None)

    def receive(event: dict[str, object]) -> None:
        run.add(event)
        progress.update(task, total=run.facts["Steps"], completed=len(run.losses))

    run_ranks("dure.cli.demo.train", options, run.ranks, receive)
