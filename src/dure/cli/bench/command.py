"""The command `dure bench`: how long collectives take on this machine, as a table and as JSON.

`operations` has what is measured and how bytes are counted; the ranks run `rank`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal  # Any: rank 0's report

import msgspec
import psutil
import typer

from dure.cli.bench.operations import (
    DTYPES,
    OPERATIONS,
    BenchPlan,
    Cell,
    show_size,
    show_time,
)
from dure.cli.machine import busy_cores, conditions, oversubscribed, usable_cores
from dure.cli.ranks import run_ranks
from dure.errors import UsageError

_MOST_RANKS = 4
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([1-9]\d*)([KMG]?)", re.IGNORECASE)
_BUFFERS = 4.5  # per rank: source, target, expected values, their parts, a byte per element
_ROW = "{:>9} {:>10} {:>8} {:>4} {:>11} {:>11} {:>7}"
_HEADS = ("size", "count", "time", "±", "algbw GB/s", "busbw GB/s", "#wrong")


def bench(
    op: Annotated[str, typer.Option(help=f"{', '.join(OPERATIONS)}: a,b or all.")] = "all_reduce",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}: a,b or all.")] = "float32",
    sizes: Annotated[str, typer.Option(help="In bytes.")] = "8,256,4K,64K,1M,16M,64M",
    ranks: Annotated[
        int, typer.Option(help="Processes; by default one per core, 2 to 4.", min=1)
    ] = min(_MOST_RANKS, max(2, usable_cores())),
    backend: Annotated[Literal["shm", "gloo", "hybrid"], typer.Option(help="Of Dure.")] = "shm",
    samples: Annotated[int, typer.Option(help="Taken of each size.", min=2)] = 7,
    sample_time: Annotated[float, typer.Option(help="Seconds of a sample.", min=0.0)] = 0.03,
    file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Measure collectives on this machine: time, bandwidth, checked results."""
    plan = BenchPlan(
        backend=backend,
        ops=names_in(op, "operation", OPERATIONS),
        dtypes=names_in(dtype, "dtype", DTYPES),
        sizes=[_bytes(word) for word in sizes.split(",")],
        samples=samples,
        sample_s=sample_time,
    )
    need, free = _BUFFERS * max(plan.sizes) * ranks, psutil.virtual_memory().available
    if need > free:
        raise UsageError(
            f"this takes about {need / 2**30:.1f} GiB of memory",
            seen=f"{free / 2**30:.1f} GiB are free",
            fix="Use fewer --ranks, or smaller --sizes.",
        )
    if file is not None:
        _open_for(file)  # before all the work
    busy = busy_cores()
    if slow := oversubscribed(ranks, busy):
        print(f"dure bench: note: {slow}", file=sys.stderr)
    about = conditions(**{"Others at work": f"{busy:.1f} cores busy just before"})
    cells: list[Cell] = []

    def receive(report: dict[str, Any]) -> None:
        if "copies" in report:
            about["machine"]["Copies"] = report["copies"]
            return
        cell = msgspec.convert(report, Cell)
        if not cells or cells[-1].title != cell.title:
            print(f"\n{cell.title}: dure {backend}\n\n{_ROW.format(*_HEADS)}")
        print(_ROW.format(*row(cell)), flush=True)
        cells.append(cell)

    run_ranks("dure.cli.bench.rank", [msgspec.json.encode(plan).decode()], ranks, receive)
    if copies := about["machine"].get("Copies"):  # it decides the figures
        print(f"\nCopies: {copies}")
    if file is not None:
        figures = [{**msgspec.to_builtins(cell), **cell.figures()} for cell in cells]
        command = shlex.join(["dure", *sys.argv[1:]])
        file.write_text(json.dumps({"command": command, **about, "cells": figures}, indent=1))
    if any(cell.wrong for cell in cells):
        print("dure bench: error: results are wrong (#wrong)", file=sys.stderr)
        raise typer.Exit(1)


def _open_for(file: Path) -> None:
    """Make the file, or raise `UsageError`."""
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError("the file of --json cannot be written", seen=str(error)) from None


def names_in(text: str, what: str, known: Iterable[str]) -> list[str]:
    """Read "a,b", or "all"."""
    names = list(known) if text == "all" else list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}", fix=f"Use one of {', '.join(known)}.")
    return names


def _bytes(word: str) -> int:
    match = _SIZE.fullmatch(word)
    if match is None:
        raise UsageError("--sizes must be numbers of bytes, such as 8,64K,1M", seen=repr(word))
    return int(match[1]) * _UNITS[match[2].upper()]


def row(cell: Cell) -> tuple[str, ...]:
    """Return a line of the table."""
    found = cell.figures()
    names = ("algorithm_gb_s", "bus_gb_s")
    rates = [f"{found[name]:.3f}" if name in found else "-" for name in names]
    size, time, spread = show_size(cell.num_bytes), show_time(found["median_s"]), found["spread"]
    return (size, str(cell.count), time, f"{spread:.0%}", *rates, str(cell.wrong))
