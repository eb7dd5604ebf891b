"""Data parallelism with a table that is too large for a trainer: it lives on a worker of its own.

The last worker holds an embedding table and does nothing else. All others are trainers: each looks
up vectors there by remote calls, and has a copy of the dense layers in `DistributedDataParallel`.
One distributed backward does both: DDP averages the gradients of the dense layers among the
trainers, and those of the table go back to where it is. `DistributedOptimizer` steps them all.

The loss must fall to a small part of what it was, and the dense layers of all trainers must end
with the same weights, bit for bit. (The table is stepped by each trainer as it comes, so losses
differ from run to run if there are several.)

    dure run --nproc 3 examples/30_ddp_with_a_remote_table.py          (at least 2)
"""

import functools
import os

import torch
from torch import nn

import dure as dist
from dure import rpc
from dure.optim import DistributedOptimizer

ITEMS, PER_ROW, WIDTH, ROWS, STEPS = 20, 3, 8, 32, 60


class Table(nn.Module):
    """Vectors of items, of which rows are looked up and added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum")

    def look_up(self, items: torch.Tensor) -> torch.Tensor:
        """Return the sum of the vectors of the items in each row: [n, k] -> [n, width]."""
        return self.bag(items)

    def parameter_references(self) -> list[rpc.RRef]:
        """Return a reference to each parameter."""
        return [rpc.RRef(p) for p in self.parameters()]


@functools.cache
def table() -> Table:
    """Return the table of this process: there is one, however many trainers ask for it."""
    return Table()


class Model(nn.Module):
    """Looks up there, and goes on here."""

    def __init__(self, there: rpc.RRef, trainers: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(1)
        dense = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
        self.there = there
        self.dense = dist.DistributedDataParallel(dense, process_group=trainers)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Map rows of items [n, k] to numbers [n, 1]."""
        return self.dense(self.there.rpc_sync().look_up(items))


def batch(trainer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of items [n, k], and the sum of the values of each: [n, 1]."""
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    items = torch.randint(ITEMS, (ROWS, PER_ROW), generator=generator)
    return items, (items.double() / ITEMS - 0.5).sum(1, keepdim=True).float()


def train(trainer: int, where: str, trainers: dist.ProcessGroup) -> list[float]:
    """Train on this trainer's rows; return the losses."""
    there = rpc.remote(where, table)
    model = Model(there, trainers)
    here = [rpc.RRef(p) for p in model.parameters()]
    everything = here + there.rpc_sync().parameter_references()
    optimizer = DistributedOptimizer(torch.optim.Adam, everything, lr=0.02)
    losses = []
    for step in range(STEPS):
        items, values = batch(trainer, step)
        with dist.autograd.context() as context:
            loss = (model(items) - values).square().mean()
            dist.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    of_all = [torch.empty_like(weights) for _ in range(dist.get_world_size(trainers))]
    dist.all_gather(of_all, weights, group=trainers)
    assert all(torch.equal(weights, other) for other in of_all)
    return losses


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group()
    trainers = dist.new_group(list(range(size - 1)))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank < size - 1:
        losses = train(rank, f"worker{size - 1}", trainers)
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), losses
        if rank == 0:
            print(f"{size - 1} trainers, one table: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
