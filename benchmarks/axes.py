"""What a step takes, and what memory, where a model is divided along one axis or another.

    dure run --nproc 1 benchmarks/axes.py
    dure run --nproc 2 benchmarks/axes.py --tp 2 [--shape 10m --batch 16 --microbatches 8]

The program is examples/llm/train.py with its flags; a thread a rank. Times are of a step with its
optimizer, of the slowest rank, medians; memory is looked at in steps of their own: each rank's own
and shared memory (Pss of what is not a file), its peak beyond what it was before the model, summed
over ranks. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

import dure as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llm"))

import train

STEPS, EVERY_S = 7, 0.02


def share() -> int:
    """Return the bytes of this process' own memory, and its part of what it shares."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(r.split()[1]) for r in rows if r.startswith(("Pss_Anon", "Pss_Shmem")))


@contextmanager
def peak() -> Iterator[list[int]]:
    """Look at the memory again and again; what is given holds the largest."""
    found, ended = [share()], threading.Event()

    def look() -> None:
        while not ended.wait(EVERY_S):
            found[0] = max(found[0], share())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def over_ranks(value: float, op: dist.ReduceOp) -> float:
    """Return the sum, or the largest, of all ranks' values."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.item()


def main() -> None:
    """Measure one mesh; print a line on one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(train.Flags):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.set_defaults(shape="10m", batch=16, microbatches=8)
    flags = train.Flags(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group()
    before = share()
    trainer = train.Trainer(flags)
    with peak() as found:
        for _ in range(3):
            trainer.train()
    memory = over_ranks(found[0] - before, dist.ReduceOp.SUM)
    times: list[float] = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        trainer.train()
        times.append(over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX) * 1e3)
    if dist.get_rank() == 0:
        mesh = {axis: size for axis in train.AXES if (size := getattr(flags, axis)) > 1}
        low, *_, high = statistics.quantiles(times, n=10)
        step = statistics.median(times)
        spread = (high - low) / step
        print(f"| {mesh or 'one rank'} | {step:.0f} ms ({spread:.0%}) | {memory / 1e6:.0f} MB |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
