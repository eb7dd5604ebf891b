"""all_reduce of the native engine beside Gloo's, in one run, sample by sample.

    python benchmarks/native_all_reduce.py [--ranks 2 4] [--samples 9] [--json FILE]

Three contestants take turns: `shm` on ordinary tensors, `arena` on tensors of `shared_empty`, and
`gloo` of torch.distributed. A sample is k operations back to back, the slowest rank's time / k. The
table shows medians, and beside them the least, because a shared machine only ever adds time; the
result of every cell is checked once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as peer

from dure import native
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.opening import create
from dure.comm.call import Call
from dure.comm.ops import ReduceOp
from dure.store.file import FileStore

KIB = 1024
SIZES = [8, 4 * KIB, 64 * KIB, KIB**2, 16 * KIB**2, 64 * KIB**2]
CONTESTANTS = ["shm", "arena", "gloo"]
SAMPLE_S = 0.02


def _contestants(
    backend: ShmBackend, size: int
) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]]:
    shared = backend.allocate(size, False).view(torch.float32)
    plain, other = torch.empty(size // 4), torch.empty(size // 4)
    return {
        "shm": (plain, lambda x: backend.run(_all_reduce(x), False)),
        "arena": (shared, lambda x: backend.run(_all_reduce(x), False)),
        "gloo": (other, peer.all_reduce),
    }


def _all_reduce(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Call:
    return Call(op="all_reduce", inputs=(tensor,), outputs=(tensor,), reduction=op)


def _sample(backend: ShmBackend, call: Callable[[], object], k: int) -> float:
    backend.run(Call(op="barrier"), False)
    began = time.perf_counter()
    for _ in range(k):
        call()
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    backend.run(_all_reduce(slowest, ReduceOp.MAX), False)
    return float(slowest) / k


def _rank(rank: int, n: int, folder: str, samples: int, out: Queue[dict[str, list[float]]]) -> None:
    torch.set_num_threads(1)
    backend = create(
        BackendOptions(
            store=FileStore(f"{folder}/ours", -1),
            rank=rank,
            size=n,
            global_ranks=tuple(range(n)),
            timeout=timedelta(seconds=60),
            name="benchmark",
        )
    )
    peer.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=n)
    times: dict[str, list[float]] = {}
    for size in SIZES:
        subjects = _contestants(backend, size)
        counts: dict[str, int] = {}
        for name, (x, run) in subjects.items():
            x.fill_(rank + 1)
            run(x)
            assert x[0] == x[-1] == n * (n + 1) / 2, f"{name} is wrong"
            x.zero_()
            counts[name] = max(1, int(SAMPLE_S / _sample(backend, partial(run, x), 2)))
        for _ in range(samples):
            for name, (x, run) in subjects.items():
                took = _sample(backend, partial(run, x), counts[name])
                times.setdefault(f"{name} {size}", []).append(took)
    if rank == 0:
        out.put(times)
    peer.destroy_process_group()
    backend.close(False)


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _table(n: int, times: dict[str, list[float]]) -> None:
    print(f"\nall_reduce of float32, {n} ranks: median (least)\n")
    print("| bytes | " + " | ".join(CONTESTANTS) + " | gloo / shm | gloo / arena |")
    print("|---" * (len(CONTESTANTS) + 3) + "|")
    for size in SIZES:
        middle = {c: statistics.median(times[f"{c} {size}"]) for c in CONTESTANTS}
        cells = [f"{_text(middle[c])} ({_text(min(times[f'{c} {size}']))})" for c in CONTESTANTS]
        ratios = [f"{middle['gloo'] / middle[c]:.1f}" for c in ("shm", "arena")]
        print("| " + " | ".join([str(size), *cells, *ratios]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{platform.node()}: torch {torch.__version__}, kernels {native.kernel_isa()}")
    context = multiprocessing.get_context("forkserver")
    everything: dict[int, dict[str, list[float]]] = {}
    for n in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out: Queue[dict[str, list[float]]] = context.Queue()
            arguments = (n, folder, options.samples, out)
            ranks = [context.Process(target=_rank, args=(r, *arguments)) for r in range(n)]
            for process in ranks:
                process.start()
            everything[n] = out.get(timeout=300)
            for process in ranks:
                process.join()
        _table(n, everything[n])
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
