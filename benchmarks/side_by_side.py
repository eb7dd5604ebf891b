"""Remote calls, sharded tensors and checkpoints: Dure beside torch.distributed, in one run.

    python benchmarks/side_by_side.py [--part PART]... [--turns N] [--json FILE]

Each library has two ranks of one thread, which wait in a read while the other library is measured.
For each case the libraries take turns, a fifth of a second of calls each. A figure is the median of
the turns, with half the distance between their quartiles. `performance.py` makes tables of
docs/performance.md from the file.

TensorPipe's processes poll while they wait, also for their turn, so RPC is measured alone, too.
The machine must be quiet, and have 4 GiB of memory free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any  # Any: what ranks answer

from compared.group import Contestant, Group
from side_by_side_rank import CASES

from dure.cli.bench.operations import show_time
from dure.cli.machine import conditions

RANK = str(Path(__file__).with_name("side_by_side_rank.py"))
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rpc": ("rpc", ("torch", "dure")),
    "rpc, torch alone": ("rpc", ("torch",)),
    "rpc, Dure alone": ("rpc", ("dure",)),
    "tensors": ("tensors", ("torch", "dure")),
    "checkpoint": ("checkpoint", ("torch", "dure")),
}
"""For each part the cases, and the libraries that take turns."""
TURN_S = 0.2


def measure(part: str, turns: int) -> list[dict[str, Any]]:
    """Measure the cases of a part; return a row for each case and library."""
    cases, libraries = PARTS[part]
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                Group(Contestant(role=(name, cases), program=(RANK,)), ranks=2)
            )
            for name in libraries
        }
        for group in groups.values():
            group.accept_ranks()
        for case in CASES[cases]:
            counts: dict[str, int] = {}
            taken: dict[str, list[float]] = {name: [] for name in libraries}
            for name, group in groups.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dure-bench-"))
                group.call("prepare", case=case, folder=folder)
                slowest = max(answer["seconds"] for answer in group.call("run", count=3)) / 3
                counts[name] = max(1, int(TURN_S / slowest))
            for _ in range(turns):
                for name, group in groups.items():
                    answers = group.call("run", count=counts[name])
                    taken[name].append(max(a["seconds"] for a in answers) / counts[name])
            for name, group in groups.items():
                group.call("forget")
                rows.append(row(part, case, name, taken[name]))
            print(shown(rows[-len(libraries) :]), flush=True)
    return rows


def row(part: str, case: str, library: str, seconds: list[float]) -> dict[str, Any]:
    """Return the figures of one case and library."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "part": part,
        "case": case,
        "library": library,
        "median_s": statistics.median(seconds),
        "spread": (quartiles[2] - quartiles[0]) / 2 / statistics.median(seconds),
        "turns": len(seconds),
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """Return a line of the table that is printed."""
    times = [f"{r['library']} {show_time(r['median_s'])} ({r['spread']:.0%})" for r in rows]
    ratio = f"  {rows[1]['median_s'] / rows[0]['median_s']:.2f}" if len(rows) == 2 else ""
    return f"{rows[0]['part']}, {rows[0]['case']}: {'  '.join(times)}{ratio}"


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only these")
    parser.add_argument("--turns", type=int, default=11, help="of each library and case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for part in options.part or PARTS for row in measure(part, options.turns)]
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
