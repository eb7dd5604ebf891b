"""An all_gather on one channel beside a reduce_scatter on the other, against one after the other.

    dure run --nproc 2 benchmarks/channels.py [--mib 64] [--rounds 61] [--heap] [--json FILE]

The contestants take turns, round by round, in an order that changes from round to round:

- `in turn`: both synchronous, one after the other, on the two channels;
- `beside`: both asynchronous, waited for in the order of their start, which alternates;
- `crossed`: as `beside`, but odd ranks start and wait in the other order;
- `one waits`: one asynchronous, the other synchronous; then the first is waited for;
- `threads`: two threads, one synchronous call each.

A round is the slowest rank's time. The table shows medians and quartiles in ms, the median of the
rounds' quotients with `in turn`, and context switches a round, of all ranks, voluntary and not.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dure as dist
from dure.cli.machine import conditions
from dure.comm.memory import heap_empty
from dure.comm.world import current_world


def contestants(bytes_: int, heap: bool) -> dict[str, Callable[[int], None]]:
    """Return what takes turns: functions of the round's number."""
    group = current_world().default
    assert group is not None
    n, rank = group.size(), group.rank()
    empty = heap_empty if heap else torch.empty
    count = bytes_ // 4 // n
    part, whole = empty(count).fill_(1.0), empty(n * count).fill_(0.0)
    full, sums = empty(n * count).fill_(1.0), empty(count).fill_(0.0)
    gathers, reduces = group.channel(0), group.channel(1)

    def gather(later: bool) -> dist.Work | None:
        return gathers.all_gather_single(whole, part, async_op=later)

    def reduce(later: bool) -> dist.Work | None:
        return reduces.reduce_scatter_single(sums, full, async_op=later)

    def in_turn(k: int) -> None:
        for call in (gather, reduce) if k % 2 else (reduce, gather):
            call(False)

    def both(first: bool) -> None:
        for work in [call(True) for call in ((gather, reduce) if first else (reduce, gather))]:
            assert work is not None
            work.wait()

    def one_waits(k: int) -> None:
        first, second = (gather, reduce) if k % 2 else (reduce, gather)
        work = first(True)
        second(False)
        assert work is not None
        work.wait()

    def threads(k: int) -> None:
        other = threading.Thread(target=gather, args=(False,))
        other.start()
        reduce(False)
        other.join()

    return {
        "in turn": in_turn,
        "beside": lambda k: both(k % 2 == 0),
        "crossed": lambda k: both((k + rank) % 2 == 0),
        "one waits": one_waits,
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--heap", action="store_true", help="tensors of the symmetric heap")
    parser.add_argument("--only", nargs="*", help="contestants besides `in turn`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("shm")
    calls = contestants(int(options.mib * 2**20), options.heap)
    names = [c for c in calls if c == "in turn" or not options.only or c in options.only]
    times: dict[str, list[float]] = {name: [] for name in names}
    switches = {name: torch.zeros(2) for name in names}
    for k in range(options.rounds + 2):
        for i in range(len(names)):
            name = names[(i + k) % len(names)]
            dist.barrier()
            before = resource.getrusage(resource.RUSAGE_SELF)
            began = time.perf_counter()
            calls[name](k // len(names) + k)
            took = torch.tensor([time.perf_counter() - began])
            after = resource.getrusage(resource.RUSAGE_SELF)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if k >= 2:
                times[name].append(1e3 * took.item())
                switches[name] += torch.tensor(
                    [after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw]
                )
    for counted in switches.values():
        dist.all_reduce(counted)
    if dist.get_rank() == 0:
        show(times, {name: [float(s) for s in counted] for name, counted in switches.items()})
        if options.json:
            options.json.write_text(json.dumps({**conditions(), "times": times}))
    dist.destroy_process_group()


def show(times: dict[str, list[float]], switches: dict[str, list[float]]) -> None:
    """Print the table."""
    print(f"{'':10}  median  quartiles      to in turn  switches")
    for name, took in times.items():
        low, middle, high = statistics.quantiles(took, n=4)
        ratio = statistics.median(a / b for a, b in zip(took, times["in turn"], strict=True))
        counts = " ".join(f"{s / len(took):8.1f}" for s in switches[name])
        print(f"{name:10} {middle:7.2f}  {low:6.2f} {high:6.2f}  {ratio:10.3f}  {counts}")


if __name__ == "__main__":
    main()
