"""Time collectives on Dure and on torch.distributed with gloo, side by side in the same processes.

    dure run --nproc 2 benchmarks/collectives.py [--seconds 0.1] [--samples 9] [--sizes 8 1048576]

Every figure is the median of several samples; the two contestants take turns, so that what else
the machine does hits both. A sample is k operations back to back; its time is that of the slowest
rank, divided by k. Each result is checked once. Sizes count as in nccl-tests: the tensor for
all_reduce and broadcast, the gathered output for all_gather, the whole input for reduce_scatter
and all_to_all. Broadcast rotates its root, so that no rank runs ahead.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as torch_dist

import dure

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
MIB = 1 << 20


def prepare(dist: ModuleType, op: str, num_bytes: int) -> Callable[[int], object]:
    """Check the operation once; return a function that runs it (its argument: how manieth)."""
    rank, size = dure.get_rank(), dure.get_world_size()
    part = max(1, num_bytes // 4 // size)
    whole = torch.full((part * size,), float(rank + 1))
    piece = torch.full((part,), float(rank + 1))
    total = size * (size + 1) / 2
    if op == "all_reduce":
        dist.all_reduce(whole)
        assert bool((whole == total).all())
        whole.zero_()
        return lambda i: dist.all_reduce(whole)
    if op == "broadcast":
        dist.broadcast(whole, size - 1)
        assert bool((whole == size).all())
        return lambda i: dist.broadcast(whole, i % size)
    if op == "all_gather":
        dist.all_gather_single(whole, piece)
        assert whole.view(size, -1)[:, -1].tolist() == list(range(1, size + 1))
        return lambda i: dist.all_gather_single(whole, piece)
    if op == "reduce_scatter":
        dist.reduce_scatter_single(piece, whole)
        assert bool((piece == total).all())
        return lambda i: dist.reduce_scatter_single(piece, whole)
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    assert received.view(size, -1)[:, 0].tolist() == list(range(1, size + 1))
    return lambda i: dist.all_to_all_single(received, whole)


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' times."""
    time_s = torch.tensor([seconds], dtype=torch.float64)
    dure.all_reduce(time_s, dure.ReduceOp.MAX)
    return time_s.item()


def sample(run: Callable[[int], object], repeats: int) -> float:
    """Return the seconds of one operation, of `repeats` back to back."""
    dure.barrier()
    start = time.perf_counter()
    for i in range(repeats):
        run(i)
    return slowest(time.perf_counter() - start) / repeats


def measure(op: str, num_bytes: int, options: argparse.Namespace) -> list[float]:
    """Return the median seconds of Dure and of gloo."""
    runs = [prepare(dist, op, num_bytes) for dist in (dure, torch_dist)]
    repeats = [max(2, int(options.seconds / sample(run, 2))) for run in runs]
    samples: list[list[float]] = [[], []]
    for _ in range(options.samples):
        for taken, run, k in zip(samples, runs, repeats, strict=True):
            taken.append(sample(run, k))
    return [statistics.median(taken) for taken in samples]


def human(seconds: float) -> str:
    """Write a time with a unit that suits it."""
    scale, unit = (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def human_bytes(num_bytes: int) -> str:
    """Write a size with a unit that suits it."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes} B"


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, MIB, 64 * MIB])
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dure.init_process_group()
    rank, size = dure.get_rank(), dure.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dure.broadcast_object_list(folder, src=0)
    store = torch_dist.FileStore(f"{folder[0]}/store", size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if rank == 0:
        print(f"{size} ranks, torch {torch.__version__}\n")
        print(f"| Operation | Size | {dure.get_backend()} | gloo | ratio |")
        print("| --- | --- | --- | --- | --- |", flush=True)
    for op in OPS:
        for num_bytes in options.sizes:
            ours, theirs = measure(op, num_bytes, options)
            if rank == 0:
                cells = (op, human_bytes(num_bytes), human(ours), human(theirs))
                print(f"| {' | '.join(cells)} | {theirs / ours:.1f} |", flush=True)
    torch_dist.destroy_process_group()
    dure.destroy_process_group()


if __name__ == "__main__":
    main()
