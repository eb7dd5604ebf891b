"""The command `dure bench`: from options to a plan, and from results to a table and JSON.

`plan` is what to measure, and how bytes are counted. `measure` takes the samples from `group`s of
ranks, each of which runs `rank`; `results` has the figures and their tables.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from dure.cli.bench.group import find_rival, ours
from dure.cli.bench.measure import measure, note
from dure.cli.bench.plan import (
    DTYPES,
    OPERATIONS,
    Plan,
    parse_names,
    parse_ranks,
    parse_rivals,
    parse_sizes,
    show_size,
)
from dure.cli.bench.results import Report, markdown, read_report, rich_table, tables_of
from dure.cli.machine import busy_cores, conditions, oversubscribed, usable_cores
from dure.errors import UsageError
from dure.trace.plain_files import read_plain

_MOST_RANKS = 4
_PAPER_COLUMNS = 140
_MOST_BYTES = 256 << 20  # of a report


def bench(
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(OPERATIONS)}, or all. Several: a,b."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}, or all.")] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes: a list such as 8,64K,1M, or MIN:MAX:FACTOR.")
    ] = "8:64M:4x",
    ranks: Annotated[
        list[str] | None, typer.Option(help="Processes, such as 2 or 2,4; by default up to 4.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Of Dure: shm, gloo, mpi or hybrid.")] = "shm",
    redop: Annotated[str, typer.Option(help="sum, product, min, max or avg.")] = "sum",
    root: Annotated[int, typer.Option(help="For broadcast and others; -1: in turn.", min=-1)] = -1,
    arena: Annotated[bool, typer.Option("--arena", help="Tensors from shared_empty.")] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Baselines in the same run: gloo, mpi, mpi@PYTHON, arena."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Taken of each cell, in turn.", min=1)] = 7,
    sample_time: Annotated[float, typer.Option(help="Seconds of a sample.", min=0.0)] = 0.03,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Show a file of --json; measure nothing.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Measure collectives on this machine: time, bandwidth, checked results; beside baselines."""
    if source is None and sys.platform != "linux":
        raise UsageError(
            "`dure bench` measures on Linux",
            seen=f"this is {sys.platform}",
            fix="Show what was measured there: dure bench --from FILE.",
        )
    plan = Plan(
        backend=backend,
        ops=parse_names("operation", op or ["all_reduce"], OPERATIONS),
        dtypes=parse_names("dtype", dtype or ["float32"], DTYPES),
        redop=redop,
        ranks=parse_ranks(ranks or [str(min(_MOST_RANKS, max(2, usable_cores())))]),
        sizes=parse_sizes(sizes),
        root=root,
        arena=arena,
        against=parse_rivals(against or []),
        samples=samples,
        sample_s=sample_time,
    )
    if json is not None and not json.absolute().parent.is_dir():  # before all the work
        raise UsageError("no such directory", seen=str(json.absolute().parent))
    screen = Console(stderr=as_markdown, quiet=as_markdown and source is not None)
    if not screen.is_terminal:
        screen.width = _PAPER_COLUMNS
    if source is None:
        report = _measure(plan, screen)
    else:
        report = _load(source)
        for key, rows in tables_of(report.cells).items():
            cells = [cell for row in rows.values() for cell in row.values()]
            screen.print(rich_table(key, cells, report.contestants))
    for name, text in report.machine.items():
        if name.startswith("Copies"):  # it decides the figures
            screen.print(f"{name}: {text}", highlight=False)
    if as_markdown:
        print(markdown(report))
    try:
        if json is not None:
            json.write_bytes(report.encode())
    except OSError as error:
        raise UsageError("the file cannot be written", seen=str(error)) from error
    for cell in report.wrong:
        where = f"{cell.key.title}, {show_size(cell.num_bytes)}, {cell.contestant}"
        print(f"dure bench: error: {where}: {cell.wrong} wrong elements", file=sys.stderr)
    if report.wrong:
        raise typer.Exit(1)


def _measure(plan: Plan, console: Console) -> Report:
    plan.check(psutil.virtual_memory().available)
    contestants = [ours(plan.backend, arena=plan.arena)]
    contestants += [find_rival(name, plan.backend) for name in plan.against]
    busy = busy_cores()
    report = Report(
        command=_command(plan),
        **conditions(**{"Others at work": f"{busy:.1f} cores busy just before"}),
        plan=plan,
    )
    if slow := oversubscribed(max(plan.ranks), busy):
        note(slow)
    measure(plan, contestants, report, console)
    return report


def _command(plan: Plan) -> str:
    """Return the command line of `plan`, with every option spelled out."""
    words = ["dure", "bench", "--backend", plan.backend]
    words += ["--op", ",".join(plan.ops), "--dtype", ",".join(plan.dtypes), "--redop", plan.redop]
    words += ["--ranks", ",".join(map(str, plan.ranks))]
    words += ["--sizes", ",".join(map(str, plan.sizes)), "--root", str(plan.root)]
    words += ["--samples", str(plan.samples), "--sample-time", f"{plan.sample_s:g}"]
    words += ["--arena"] if plan.arena else []
    words += ["--against", ",".join(plan.against)] if plan.against else []
    return shlex.join(words)


def _load(path: Path) -> Report:
    try:
        return read_report(read_plain(path, _MOST_BYTES), str(path))
    except OSError as error:
        raise UsageError("the file cannot be read", seen=str(error)) from error
