"""What a rank costs in jobs of 16 to 10,000 ranks, measured or simulated on this machine.

    python benchmarks/scale --all [--write]
    python benchmarks/scale --row N... [--ranks N...]

Each row of `ROWS` is a module `row_NAME.py` here, with

    TITLE: str                                  # what it measures, in a few words
    RANKS: tuple[int, ...]                      # the numbers of ranks that make sense for it
    def measure(ranks: int) -> dict[str, float] # figures by names that contain the unit

Each call of `measure` runs in a fresh process. The table has a line for each figure, with its value
at each number of ranks and the law that the values follow (`laws.py`). `docs/scale.md` says what
is measured and what is simulated; `--write` puts the table there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laws import law_of

from dure.cli.machine import busy_cores, conditions

ROWS = {
    1: "rendezvous",
    2: "groups",
    3: "sharding",
    4: "checkpoint",
    5: "hosts",
    6: "rpc",
    7: "output",
    8: "planning",
    9: "launch",
}
"""The modules, by the numbers of their rows in docs/scale.md."""

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BEGIN, END = "<!-- figures: scale -->", "<!-- end: scale -->"
LIMIT_S = 300.0
"""How long one measurement may take."""

Figures = dict[str, dict[int, float]]
"""Values by the figure's name and the number of ranks."""


def measured(row: int, wanted: Sequence[int]) -> tuple[str, Figures]:
    """Return a row's title, and its figures at its own numbers of ranks that are wanted."""
    module = importlib.import_module(f"row_{ROWS[row]}")
    figures: Figures = {}
    for ranks in module.RANKS:
        if wanted and ranks not in wanted:
            continue
        began = time.monotonic()
        for name, value in in_fresh_process(row, ranks).items():
            figures.setdefault(name, {})[ranks] = value
        took_s = time.monotonic() - began
        print(f"row {row}, {ranks} ranks: {took_s:.0f} s", file=sys.stderr, flush=True)
    return module.TITLE, figures


def in_fresh_process(row: int, ranks: int) -> dict[str, float]:
    """Return the figures of one measurement."""
    command = [sys.executable, __file__, "--measure", str(row), str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: dict[int, tuple[str, Figures]]) -> str:
    """Return the figures as a table in Markdown."""
    columns = sorted({n for _, figures in rows.values() for by in figures.values() for n in by})
    head = ["#", "What", "Figure", *(f"{n:,}" for n in columns), "law"]
    lines = [head, ["---:", "---", "---", *("---:" for _ in columns), "---"]]
    for row, (title, figures) in rows.items():
        for index, (name, by_ranks) in enumerate(figures.items()):
            first = [str(row), title] if index == 0 else ["", ""]
            cells = [shown(by_ranks[n]) if n in by_ranks else "" for n in columns]
            lines.append([*first, name, *cells, law_of(by_ranks)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def shown(value: float) -> str:
    """Return three significant digits, or all digits of a whole number."""
    if value == int(value) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def write(text: str, busy: float) -> None:
    """Put the table into the page, with the machine that it was made on."""
    seen = conditions(**{"Others at work": f"{busy:.1f} cores busy just before"})
    machine = "; ".join(f"{name}: {value}" for name, value in seen["machine"].items())
    note = f"Measured {seen['when']} at commit {seen['versions']['commit']}. {machine}."
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{note}\n\n{END}{after}")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/scale", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--all", action="store_true", help="measure all rows")
    parser.add_argument("--row", type=int, nargs="+", choices=list(ROWS), default=[])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="only these numbers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scale.md")
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        row, ranks = options.measure
        print(json.dumps(importlib.import_module(f"row_{ROWS[row]}").measure(ranks)))
        return
    if not options.all and not options.row:
        parser.error("pass --all, or --row with numbers of rows")
    busy = busy_cores()
    rows = {row: measured(row, options.ranks) for row in (options.row or ROWS)}
    text = table(rows)
    print(text)
    if options.json is not None:
        listed = {row: {"title": title, "figures": by} for row, (title, by) in rows.items()}
        options.json.write_text(json.dumps({**conditions(), "rows": listed}, indent=1) + "\n")
    if options.write:
        write(text, busy)


if __name__ == "__main__":
    main()
