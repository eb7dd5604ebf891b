"""Hybrid against plain Gloo over hosts that are network namespaces of this machine (needs root).

    python benchmarks/hosts.py [--hosts 2] [--ranks-each 2] [--mib 16] [--rounds 15]

All ranks make one group of each backend and take turns, so that both see the same machine; each
time is that of the slowest rank. The network is a veth pair and a bridge: it costs CPU and has no
wire, so what counts here is bytes and copies. A real network would favour `hybrid` more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import dure as dist

BACKENDS = ("hybrid", "gloo")


def measure(group: dist.ProcessGroup, count: int) -> float:
    """Return the seconds of one all_reduce, from the first rank's start to the last one's end."""
    t = torch.full((count,), 1.0)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(t, group=group)
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    assert t[0] == t[-1] == dist.get_world_size()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def be_rank(nbytes: int, rounds: int) -> None:
    """Be one rank of the job."""
    torch.set_num_threads(1)
    dist.init_process_group("hybrid")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for round_ in range(rounds + 2):
        for name, group in groups.items():
            took = measure(group, nbytes // 4)
            if round_ >= 2:
                times[name].append(took)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def main() -> None:
    """Make the hosts, run the job, print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-each", type=int, default=2)
    parser.add_argument("--mib", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.comm.namespace_hosts import (  # lazy: only the parent needs them
        hosts,
        start_job,
        why_not,
    )

    if why_not():
        sys.exit(f"cannot make hosts here: {why_not()}")
    nbytes = int(args.mib * 2**20) // 4 * 4
    with tempfile.TemporaryDirectory() as folder, hosts(args.hosts) as made:
        program = [str(Path(__file__).resolve()), "--rank", str(nbytes), str(args.rounds)]
        ranks = start_job(made, args.ranks_each, program, Path(folder) / "key")
        outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(error for _, error in outputs))
    times = json.loads(outputs[0][0])
    print(f"{args.hosts} hosts x {args.ranks_each} ranks, all_reduce of {args.mib:g} MiB float32")
    for name, seconds in times.items():
        low, middle, high = (x * 1e3 for x in statistics.quantiles(seconds, n=4))
        print(f"  {name:7} median {middle:8.2f} ms, quartiles {low:.2f} to {high:.2f}")
    ratio = statistics.median(times["gloo"]) / statistics.median(times["hybrid"])
    print(f"  gloo / hybrid: {ratio:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
