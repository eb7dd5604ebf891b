"""A report as a run leaves it, made up."""

from dure.cli.bench.plan import Plan
from dure.cli.bench.results import Cell, Report

OURS, RIVAL = "dure shm", "gloo"
PLAN = Plan(
    backend="shm",
    ops=("all_reduce",),
    dtypes=("float32",),
    redop="sum",
    ranks=(2,),
    sizes=(8, 1024),
    root=-1,
    arena=False,
    against=(),
    samples=3,
    sample_s=0.01,
)


def cell(size: int, contestant: str, *samples: float, **other) -> Cell:
    values = {"op": "all_reduce", "dtype": "float32", "redop": "sum", "ranks": 4, **other}
    return Cell(num_bytes=size, count=size // 4, contestant=contestant, samples_s=samples, **values)


def report() -> Report:
    return Report(
        command="dure bench --against 'a <b>'",
        when="2026-01-31 12:00",
        machine={"Processor": "Abacus & Sons"},
        versions={"dure": "1"},
        plan=PLAN,
        contestants=[OURS, RIVAL],
        cells=[
            cell(8, OURS, 1e-6, 2e-6, 3e-6),
            cell(8, RIVAL, 200e-6, 500e-6, 600e-6),
            cell(1 << 20, OURS, 1e-3),
            cell(1 << 20, RIVAL, note="it does not do that"),
            cell(0, OURS, 1e-6, op="barrier", redop=""),
            cell(0, RIVAL, 5e-6, op="barrier", redop="", wrong=0),
        ],
    )
