"""A program for torch.distributed; test_spawn_in_every_way.py changes its one import.

for_torch.py env                          RANK and the other variables are set
for_torch.py fork|spawn PORT SIZE         starts its ranks itself
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def collectives(rank: int, size: int) -> None:
    """A sum in a group, and the mean of a module's gradients, by which all ranks step alike."""
    group = dist.new_group(list(range(size)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    assert tensor.item() == size
    model = nn.Linear(3, 2)
    dist.broadcast(model.weight.data, 0)
    model(torch.full((4, 3), float(rank))).sum().backward()
    assert model.weight.grad is not None
    dist.all_reduce(model.weight.grad)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0 * sum(range(size))))


def run(rank: int, size: int) -> None:
    """What every rank does."""
    collectives(rank, size)
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: done", flush=True)


def init_process(rank: int, size: int, port: str) -> None:
    """Join from a process that the program has started."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=size)
    run(rank, size)


def start_own_ranks(method: str, port: str, size: int) -> None:
    """Start the ranks from within."""
    context = mp.get_context(method)
    processes = [context.Process(target=init_process, args=(r, size, port)) for r in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(p.exitcode or 0 for p in processes))


def main(how: str, *rest: str) -> None:
    """Join in the way that is named, and run."""
    if how in ("fork", "spawn"):
        start_own_ranks(how, rest[0], int(rest[1]))
    dist.init_process_group()
    run(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    main(*sys.argv[1:])
