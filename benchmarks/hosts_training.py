"""Sharded training over hosts that are network namespaces of this machine (needs root).

    python benchmarks/hosts_training.py [--hosts 2] [--ranks-each 2] [--model gpt10m] [--rounds 15]

Every rank has the model three times: without communication, sharded by Dure over `hybrid`, and by
torch's FSDP2 over gloo. They take turns, a step each, so that all see the same machine; a step
takes as long as its slowest rank. What a step takes beyond one without communication is exposed.
All ranks share this machine's cores, and the network has no wire: what counts is processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dure as dist
from dure.fsdp import fully_shard

KINDS = ("none", "dure", "gloo")
GLOO_PORT = 29600


def make_step(kind: str, model: str) -> Callable[[], None]:
    """Return what does one step of a fresh model."""
    from training_rank import gpt  # lazy: the parent trains nothing

    torch.manual_seed(0)
    module, loss_of = gpt(model)
    sharded = [m for m in module.modules() if type(m).__name__ == "Block"] + [module]
    if kind == "dure":
        for part in sharded:
            fully_shard(part)
    elif kind == "gloo":
        place = f"tcp://{os.environ['MASTER_ADDR']}:{GLOO_PORT}"
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", (size,))
        for part in sharded:
            torch_fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(module).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def be_rank(model: str, rounds: int) -> None:
    """Be one rank of the job."""
    torch.set_num_threads(1)
    dist.init_process_group("hybrid")
    steps = {kind: make_step(kind, model) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(rounds + 3):
        for kind, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_ >= 3:
                times[kind].append(took.item())
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.barrier()
    torch.distributed.destroy_process_group()
    dist.destroy_process_group()


def main() -> None:
    """Make the hosts, run the job, print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-each", type=int, default=2)
    parser.add_argument("--model", default="gpt10m", choices=["gpt10m", "gpt50m"])
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
    with tempfile.TemporaryDirectory() as folder, hosts(args.hosts) as made:
        program = [str(Path(__file__).resolve()), "--rank", args.model, str(args.rounds)]
        key = Path(folder) / "key"
        ranks = start_job(made, args.ranks_each, program, key, GLOO_SOCKET_IFNAME="eth0")
        outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(error for _, error in outputs))
    times = json.loads(outputs[0][0])
    print(f"{args.hosts} hosts x {args.ranks_each} ranks, {args.model}")
    alone = statistics.median(times["none"])
    for kind, seconds in times.items():
        low, middle, high = (x * 1e3 for x in statistics.quantiles(seconds, n=4))
        exposed = middle - alone * 1e3
        print(
            f"  {kind:5} median {middle:6.0f} ms ({low:.0f} to {high:.0f}), exposed {exposed:4.0f}"
        )
    ratio = (statistics.median(times["dure"]) - alone) / (statistics.median(times["gloo"]) - alone)
    print(f"  exposed, dure / gloo: {ratio:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
