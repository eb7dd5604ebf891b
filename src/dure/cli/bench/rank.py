"""What a rank of `dure bench` runs: operations at each size, checked and timed; rank 0 reports.

Every operation runs on fresh values before the samples and once more after them, and each element
is compared with its expected value. Values are integers that every element type holds exactly,
and so are their sums:

- *moved*: element i of rank r's buffer is 1 + (i + 17 r) mod 113.
- *added up*: 1 + (i + r) mod 5.

Shifted by a chunk, swapped between ranks, or with a rank left out, the result is another one.
Operations with a root take each rank in turn, so that no rank runs ahead of the others.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

import dure
from dure.cli.bench.operations import OPERATIONS, BenchPlan

_WARM_UP = 0.3
_MAX_REPEATS = 50_000
Run = Callable[[int], object]
"""Runs an operation once; its argument decides the root."""


@dataclass(frozen=True)
class Case:
    """One operation at one size, on one rank."""

    op: str
    dtype: torch.dtype
    count: int
    rank: int
    size: int


def held(case: Case, rank: int, count: int) -> torch.Tensor:
    """Return the first `count` elements that a rank holds before the operation."""
    values = [1 + (i + 17 * rank) % 113 for i in range(113)]
    if OPERATIONS[case.op].reduces:
        values = [1 + (i + rank) % 5 for i in range(5)]
    return torch.tensor(values).to(case.dtype).repeat(-(-count // len(values)))[:count]


def expected(case: Case) -> torch.Tensor | None:
    """Return what this rank must hold after the operation, with the last rank as root.

    None if that is left open.
    """
    rank, n, count = case.rank, case.size, case.count
    if case.op in {"gather", "reduce"} and rank != n - 1:
        return None
    if OPERATIONS[case.op].reduces:
        total = functools.reduce(torch.add, (held(case, r, count) for r in range(n)))
        return total.chunk(n)[rank] if case.op == "reduce_scatter" else total
    if case.op in {"all_gather", "gather"}:
        return torch.cat([held(case, r, count // n) for r in range(n)])
    if case.op == "all_to_all":
        return torch.cat([held(case, r, count).chunk(n)[rank] for r in range(n)])
    if case.op in {"broadcast", "scatter"}:
        sent = held(case, n - 1, count)
        return sent.chunk(n)[rank] if case.op == "scatter" else sent
    if case.op == "sendrecv" and rank < 2:
        return held(case, 1 - rank, count)
    return None


def operation(case: Case, a: torch.Tensor, b: torch.Tensor) -> Run:
    """Return a function that runs the operation once, on source `a` and target `b`."""
    parts = list({"gather": b, "scatter": a}.get(case.op, a).chunk(case.size))

    def root(turn: int) -> int:
        return turn % case.size

    def mine(turn: int) -> list[torch.Tensor] | None:
        return parts if root(turn) == case.rank else None

    def there_and_back(turn: int) -> None:
        for sender in (0, 1) if case.rank < 2 else ():
            if case.rank == sender:
                dure.send(a, 1 - sender)
            else:
                dure.recv(b, sender)

    runs: dict[str, Run] = {
        "all_reduce": lambda turn: dure.all_reduce(a),
        "broadcast": lambda turn: dure.broadcast(a, root(turn)),
        "reduce": lambda turn: dure.reduce(a, root(turn)),
        "all_gather": lambda turn: dure.all_gather_single(b, a),
        "reduce_scatter": lambda turn: dure.reduce_scatter_single(b, a),
        "all_to_all": lambda turn: dure.all_to_all_single(b, a),
        "gather": lambda turn: dure.gather(a, mine(turn), root(turn)),
        "scatter": lambda turn: dure.scatter(b, mine(turn), root(turn)),
        "sendrecv": there_and_back,
        "barrier": lambda turn: dure.barrier(),
    }
    return runs[case.op]


def measured(case: Case, plan: BenchPlan) -> tuple[list[float], int]:
    """Return the seconds of each sample, of its slowest rank, and the number of wrong elements."""
    op, n, count = case.op, case.size, case.count
    part = count // n
    source = torch.empty(part if op in {"all_gather", "gather"} else count, dtype=case.dtype)
    target = source  # in place, if not another tensor
    if op in {"all_gather", "gather", "all_to_all", "sendrecv"}:
        target = torch.empty(count, dtype=case.dtype)
    elif op in {"reduce_scatter", "scatter"}:
        target = torch.empty(part, dtype=case.dtype)
    run = operation(case, source, target)

    def wrong() -> int:
        target.zero_()
        source.copy_(held(case, case.rank, len(source)))
        run(n - 1)
        wanted = expected(case)
        return 0 if wanted is None else int((target != wanted).sum())

    def sample(repeats: int) -> float:
        dure.barrier()
        start = time.perf_counter()
        for turn in range(repeats):
            run(turn)
        return (time.perf_counter() - start) / repeats / (2 if op == "sendrecv" else 1)

    num_wrong = wrong()
    if op in {"all_reduce", "reduce"}:
        source.zero_()  # in place, again and again: zeros stay what they are
    one_s = _slowest([sample(1)])[0]
    one_s = _slowest([sample(_fill(_WARM_UP * plan.sample_s, one_s))])[0]
    repeats = _fill(plan.sample_s, one_s)
    samples_s = _slowest([sample(repeats) for _ in range(plan.samples)])
    total = torch.tensor(num_wrong + wrong())
    dure.all_reduce(total)
    return samples_s, int(total)


def _slowest(seconds: list[float]) -> list[float]:
    """Return the longest time of all ranks, for each place."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dure.all_reduce(times, dure.ReduceOp.MAX)
    return times.tolist()


def _fill(seconds: float, one_s: float) -> int:
    """Return how many operations of `one_s` fill so many seconds; at least one."""
    return max(1, min(_MAX_REPEATS, int(seconds / max(one_s, 1e-9))))


def main() -> None:
    """Measure all of the plan that the command line has as JSON."""
    plan = msgspec.json.decode(sys.argv[1], type=BenchPlan)
    torch.set_num_threads(1)
    dure.init_process_group(plan.backend)
    rank, n = dure.get_rank(), dure.get_world_size()

    def report(**values: object) -> None:
        if rank == 0:
            print(json.dumps({"dure": values}), flush=True)

    report(copies=str(getattr(dure.group.WORLD, "copies", None) or ""))
    for op in plan.ops:
        how = OPERATIONS[op]
        for name in plan.dtypes if op != "barrier" else plan.dtypes[:1]:
            dtype = getattr(torch, name)
            sizes = [0] if op == "barrier" else plan.sizes
            for count in dict.fromkeys(how.elements(size, dtype.itemsize, n) for size in sizes):
                samples_s, wrong = measured(Case(op, dtype, count, rank, n), plan)
                report(
                    op=op,
                    dtype=name,
                    ranks=n,
                    num_bytes=count * dtype.itemsize,
                    count=count,
                    samples_s=samples_s,
                    wrong=wrong,
                )
    dure.destroy_process_group()


if __name__ == "__main__":
    main()
