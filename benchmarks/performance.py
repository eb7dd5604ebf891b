"""Take the figures of docs/performance.md and docs/performance_tables.md again, and write them.

    python benchmarks/performance.py [--mpi PYTHON]... [--only NAME]... [--render]

Runs `collectives.py` once for each entry of `RUNS`, and the programs of `PROGRAMS`, which leave
benchmarks/results/NAME.json, and puts the tables between the markers of these two pages. Each
--mpi is a Python with mpi4py and an mpirun beside it. With --render nothing is measured: the tables
are made from the files. The machine must be quiet, and have 16 GiB of memory free.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any  # Any: rows of JSON

from compared.results import Cell, Key, Report, read_report, tables_of

from dure.cli.bench.operations import show_size, show_time

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "docs" / "performance.md", ROOT / "docs" / "performance_tables.md")
OURS, ARENA, GLOO = "dure shm", "dure shm arena", "gloo"
MOVING = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all,sendrecv,barrier"
HOW = ("--samples", "7", "--sample-time", "0.02")
RUNS: dict[str, tuple[str, ...]] = {
    "collectives": (
        *("--op", MOVING, "--ranks", "2,4", "--sizes", "8,4K,64K,1M,16M,64M"),
        *("--against", "arena,gloo"),
    ),
    "largest": (
        *("--op", "all_reduce", "--ranks", "2,4", "--sizes", "256M", "--against", "arena,gloo"),
    ),
    "bfloat16": (
        *("--op", "all_reduce", "--dtype", "float32,bfloat16", "--ranks", "2,4"),
        *("--sizes", "512K,1M,2M,8M,16M,32M,64M"),
    ),
    "crowd": ("--op", "all_reduce", "--ranks", "2,8", "--sizes", "8,4K,64K,1M,16M,64M"),
}
RIVALS_OF_ALL = {"collectives", "largest"}
PROGRAMS = ("side_by_side", "training")
RPC, TENSORS, CHECKPOINT = "rpc", "tensors", "checkpoint"


def measure(name: str, pythons: Sequence[str]) -> None:
    """Run one entry of `RUNS`, or a program; leave its file."""
    path = RESULTS / f"{name}.json"
    if name in PROGRAMS:
        program = str(ROOT / "benchmarks" / f"{name}.py")
        subprocess.run([sys.executable, program, "--json", str(path)], check=True)
        return
    words = list(RUNS[name])
    if name in RIVALS_OF_ALL:
        words[-1] = ",".join([words[-1], *(f"mpi@{python}" for python in pythons)])
    began = time.monotonic()
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "collectives.py"),
        *words,
        *HOW,
        "--json",
        str(path),
    ]
    subprocess.run(command, check=True)
    # Where a Python lies is this machine's business; which environment it is, is told.
    text = path.read_text().replace(f"{ROOT}/", "")
    path.write_text(re.sub(r"mpi@[^\s,\"]*?([^/\s,\"]+/bin/\w+)", r"mpi@\1", text))
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def load(name: str) -> Report:
    """Read the file of one entry."""
    path = RESULTS / f"{name}.json"
    return read_report(path.read_bytes(), str(path))


def seconds(cell: Cell | None) -> float | None:
    """Return the median of a cell, if it was measured."""
    return cell.median_s if cell else None


def shown(value: float | None) -> str:
    """Write a time, or a dash."""
    return show_time(value) if value else "-"


def ratio(a: float | None, b: float | None) -> str:
    """Write a / b."""
    return f"{a / b:.2f}×" if a and b else "-"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def render_machine() -> list[str]:
    """Say on what machine, when, and with which versions."""
    report = load("collectives")
    facts = [*report.machine.items(), *report.versions.items(), ("Taken", report.when)]
    return [*(f"- {name}: {value}" for name, value in facts), "", "```", report.command, "```", ""]


def render_collectives() -> list[str]:
    """Return a table for each operation and number of ranks."""
    reports = [load("collectives"), load("largest")]
    mpis = [n for n in reports[0].contestants if n not in {OURS, ARENA, GLOO}]
    cells = [cell for report in reports for cell in report.cells]
    out: list[str] = []
    for key, rows in sorted(tables_of(cells).items(), key=lambda item: item[0].ranks):
        heads = ["size", "Dure", "heap", GLOO, *mpis]
        heads += ["Dure / best MPI", "heap / best MPI", "gloo / Dure"]
        out += [f"**{key.title}**", ""]
        out += table(heads, [_row(rows[size], size, mpis) for size in sorted(rows)])
    return out


def _row(cells: dict[str, Cell], size: int, mpis: Sequence[str]) -> list[str]:
    ours, arena = seconds(cells.get(OURS)), seconds(cells.get(ARENA))
    gloo = seconds(cells.get(GLOO))
    rivals = [seconds(cells.get(name)) for name in mpis]
    best = min((value for value in rivals if value), default=None)
    times = [shown(value) for value in (ours, arena, gloo, *rivals)]
    many = f"{gloo / ours:.0f}×" if gloo and ours else "-"
    return [show_size(size), *times, ratio(ours, best), ratio(arena, best), many]


def render_bfloat16() -> list[str]:
    """Compare bfloat16 with float32 at equal numbers of elements."""
    tables = tables_of(load("bfloat16").cells)
    out: list[str] = []
    for ranks in sorted({key.ranks for key in tables if key.dtype == "bfloat16"}):
        narrow = tables[Key("all_reduce", "bfloat16", "sum", ranks)]
        wide = tables[Key("all_reduce", "float32", "sum", ranks)]
        rows: list[list[str]] = []
        for size in sorted(wide):
            if size // 2 in narrow:
                a, b = (seconds(cells.get(OURS)) for cells in (narrow[size // 2], wide[size]))
                rows.append([f"{size // 4:,}", shown(b), shown(a), ratio(a, b)])
        heads = ["elements", "float32", "bfloat16", "bfloat16 / float32"]
        out += [f"**all_reduce, {ranks} ranks**", "", *table(heads, rows)]
    return out


def render_crowd() -> list[str]:
    """Compare 8 ranks with 2."""
    tables = tables_of(load("crowd").cells)
    few, many = (tables[Key("all_reduce", "float32", "sum", ranks)] for ranks in (2, 8))
    rows: list[list[str]] = []
    for size in sorted(few):
        a, b = (seconds(cells[size].get(OURS)) for cells in (few, many))
        rows.append([show_size(size), shown(a), shown(b), ratio(b, a)])
    return table(["size", "2 ranks", "8 ranks", "8 / 2"], rows)


def _conditions(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return when and on which processor a program was run, and its rows."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    machine = found["machine"]
    cores = machine.get("Cores", "").partition(" ")[0]
    return f"{machine['Processor']}, {cores} cores, {found['when']}.", found["rows"]


def render_beside(part: str, alone: tuple[str, str] | None = None) -> list[str]:
    """Compare Dure with torch.distributed, in turn; `alone`: the parts in which each was alone."""
    when, rows = _conditions("side_by_side")
    found = {(r["part"], r["case"], r["library"]): r["median_s"] for r in rows}
    what = ("torch", "Dure", "Dure / torch")
    ways = ("",) if alone is None else (", alone", ", in turn")
    heads = ["", *(f"{each}{way}" for way in ways for each in what)]
    out: list[list[str]] = []
    for case in dict.fromkeys(r["case"] for r in rows if r["part"] == part):
        cells = [case]
        for torch_in, dure_in in (*([alone] if alone is not None else []), (part, part)):
            rival, mine = found.get((torch_in, case, "torch")), found.get((dure_in, case, "dure"))
            cells += [shown(rival), shown(mine), ratio(mine, rival)]
        out.append(cells)
    return [when, "", *table(heads, out)]


def render_training() -> list[str]:
    """Return a table for each model: a step, what communication adds, and memory."""
    when, rows = _conditions("training")
    out = [when, ""]
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        out += [f"**{model}, {mine[0]['parameters'] / 1e6:.1f} M parameters**", ""]
        cells: list[list[str]] = []
        for r in mine:
            added = "-" if r["exposed"] is None else f"{r['exposed']:+.1%}"
            memory = f"{r['rss_bytes'] / 1e6:.0f} MB"
            cells.append([r["contestant"], shown(r["step_s"]), added, memory])
        out += table(["", "step", "over no communication", "peak RSS of a rank"], cells)
    return out


RENDERED: dict[str, Callable[[], list[str]]] = {
    "machine": render_machine,
    "collectives": render_collectives,
    "bfloat16": render_bfloat16,
    "crowd": render_crowd,
    "training": render_training,
    "tensors": partial(render_beside, TENSORS),
    "checkpoint": partial(render_beside, CHECKPOINT),
    "rpc": partial(render_beside, RPC, (f"{RPC}, torch alone", f"{RPC}, Dure alone")),
}


def render(text: str) -> str:
    """Return a document, with its tables written again from the files."""
    for name, make in RENDERED.items():
        begin, end = f"<!-- figures: {name} -->", f"<!-- end: {name} -->"
        if begin not in text:
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = "\n".join([head + begin, "", *make()]) + end + tail
    return text


def main() -> None:
    """Measure what is asked for, and write the documents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mpi", action="append", default=[], help="a Python with mpi4py")
    names = [*RUNS, *PROGRAMS]
    parser.add_argument("--only", action="append", choices=names, help="run only these")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in [] if options.render else options.only or names:
        measure(name, options.mpi)
    for document in DOCUMENTS:
        document.write_text(render(document.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
