"""Collectives of Dure beside those of other libraries, in one run, with checked results.

    python benchmarks/collectives.py --op all --against gloo,mpi
    python benchmarks/collectives.py --ranks 2,4 --against mpi@openmpi/bin/python --json FILE

Every library has its own processes, which stay alive for the whole run, compute with one thread,
and are bound to no core. Libraries take turns, sample by sample, so that everything else that the
machine does meets all of them. `gloo` is torch.distributed with its Gloo backend; `mpi` is mpi4py
on numpy arrays, of this Python or of another one (`mpi@PYTHON`) with an mpirun beside it; `arena`
is Dure on tensors of `shared_empty`. An operation that a library does not have is a dash. Wrong
results are reported, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import psutil
from compared.group import find_rival, ours
from compared.measure import measure, note
from compared.plan import ITEM_BYTES, Plan, parse_names, parse_ranks, parse_rivals, parse_sizes
from compared.results import Report
from rich.console import Console

from dure.cli.bench.operations import OPERATIONS, show_size
from dure.cli.machine import busy_cores, conditions, oversubscribed
from dure.errors import DureError

_PAPER_COLUMNS = 140


def read_options() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--op", default="all_reduce", help=f"{', '.join(OPERATIONS)}: a,b or all")
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(ITEM_BYTES)}: a,b or all")
    parser.add_argument("--sizes", default="8,256,4K,64K,1M,16M,64M", help="in bytes")
    parser.add_argument("--ranks", default="2", help="processes, one group after the other: 2,4")
    parser.add_argument("--backend", default="shm", help="of Dure: shm, gloo, mpi or hybrid")
    parser.add_argument("--redop", default="sum", help="sum, product, min, max or avg")
    parser.add_argument("--arena", action="store_true", help="tensors from shared_empty")
    parser.add_argument("--against", default="", help="gloo, mpi, mpi@PYTHON, arena")
    parser.add_argument("--samples", type=int, default=7, help="of each size")
    parser.add_argument("--sample-time", type=float, default=0.03, help="in seconds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    plan = Plan(
        backend=options.backend,
        ops=parse_names("operation", [options.op], OPERATIONS),
        dtypes=parse_names("dtype", [options.dtype], ITEM_BYTES),
        redop=options.redop,
        ranks=parse_ranks([options.ranks]),
        sizes=parse_sizes(options.sizes),
        arena=options.arena,
        against=parse_rivals([options.against]),
        samples=options.samples,
        sample_s=options.sample_time,
    )
    plan.check(psutil.virtual_memory().available)
    return plan, options.json


def run() -> Report:
    """Measure as the command line says; write the file."""
    plan, path = read_options()
    contestants = [ours(plan.backend, arena=plan.arena)]
    contestants += [find_rival(name, plan.backend) for name in plan.against]
    busy = busy_cores()
    report = Report(
        command=shlex.join(["python", "benchmarks/collectives.py", *sys.argv[1:]]),
        **conditions(**{"Others at work": f"{busy:.1f} cores busy just before"}),
        plan=plan,
    )
    if slow := oversubscribed(max(plan.ranks), busy):
        note(slow)
    screen = Console()
    if not screen.is_terminal:
        screen.width = _PAPER_COLUMNS
    measure(plan, contestants, report, screen)
    if path is not None:
        path.write_bytes(report.encode())
    return report


def main() -> int:
    try:
        report = run()
    except DureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for cell in report.wrong:
        where = f"{cell.key.title}, {show_size(cell.num_bytes)}, {cell.contestant}"
        print(f"error: {where}: {cell.wrong} wrong elements", file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
