"""A program for torch.distributed; test_spawn_in_every_way.py changes its one import.

for_torch.py env                          RANK and the other variables are set
for_torch.py URL RANK SIZE [BACKEND]      tcp://host:port or file:///path
for_torch.py fork|spawn PORT SIZE         starts its ranks itself
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def point_to_point(rank: int, size: int) -> None:
    """Blocking, then immediate: a number goes from rank 0 to rank 1."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
    request = None
    if rank == 0:
        request = dist.isend(tensor=tensor + 1, dst=1)
    elif rank == 1:
        request = dist.irecv(tensor=tensor, src=0)
    if request is not None:
        request.wait()
    assert tensor.item() == min(rank, 1) + 1 or rank > 1


def collectives(rank: int, size: int) -> None:
    """A sum in a group, and a gather."""
    group = dist.new_group(list(range(size)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    assert tensor.item() == size
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([rank, size], dtype=torch.float32))
    assert [t[0].item() for t in gathered] == list(range(size))
    scattered = torch.zeros(1)
    parts = [torch.full((1,), float(r)) for r in range(size)] if rank == 0 else None
    dist.scatter(scattered, scatter_list=parts, src=0)
    assert scattered.item() == rank
    dist.barrier()


def average_gradients(model: nn.Module) -> None:
    """Sum up, and divide by the number of ranks."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def sgd(rank: int, size: int) -> None:
    """A few steps on data of the rank's own; all ranks end with the same weights."""
    torch.manual_seed(1234)
    model = nn.Linear(3, 2)
    torch.manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 3)).pow(2).mean().backward()
        average_gradients(model)
        with torch.no_grad():  # `torch.optim` would load torch._dynamo first, for a second
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(0.1 * param.grad)
    first = model.weight.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, model.weight)


def run(rank: int, size: int) -> None:
    """What every rank does."""
    point_to_point(rank, size)
    collectives(rank, size)
    sgd(rank, size)
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
    elif how == "env":
        dist.init_process_group()
    else:
        rank, size, *backend = rest
        dist.init_process_group(*backend, init_method=how, rank=int(rank), world_size=int(size))
    run(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    main(*sys.argv[1:])
