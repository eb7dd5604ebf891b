"""A pipeline of two stages, each a `RemoteModule` on a worker of its own.

Worker 0 cuts a batch into microbatches and sends them all to the first stage; as each comes back it
goes on to the second, which works on it while the first has the next. Backward is one call, over
all microbatches and three processes.

How can one know that it is right? One process with the same layers has the same losses.

    dure run --nproc 3 examples/31_pipeline_of_remote_modules.py          (at least 2)
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import dure as dist
from dure import rpc
from dure.nn import RemoteModule
from dure.optim import DistributedOptimizer

FEATURES, WIDTH, CLASSES, ROWS, MICROBATCHES, STEPS = 16, 32, 4, 48, 4, 25


class Stage(nn.Module):
    """Some of the layers.

    Args:
        index: 0 for the first stage, 1 for the second.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        a, b = [(FEATURES, WIDTH), (WIDTH, CLASSES)][index]
        self.layers = nn.Sequential(nn.Linear(a, WIDTH), nn.Tanh(), nn.Linear(WIDTH, b)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, a] to [n, b]."""
        return self.layers(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points [n, features], and the class of each [n]: the largest of the first four."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x, x[:, :CLASSES].argmax(1)


def train_in_stages(workers: list[str]) -> list[float]:
    """Train with a stage on each of these workers; return the losses."""
    stages, everything = [], []
    for i, worker in enumerate(workers):
        stage = RemoteModule(f"{worker}/cpu", Stage, (i,))
        everything += stage.remote_parameters()  # made by now: both may draw from one generator
        stages.append(stage)
    optimizer = DistributedOptimizer(torch.optim.Adam, everything, lr=0.01)
    losses = []
    for step in range(STEPS):
        x, classes = batch(step)
        with dist.autograd.context() as context:
            first = [stages[0].forward_async(rows) for rows in x.chunk(MICROBATCHES)]
            second = [stages[1].forward_async(rows.wait()) for rows in first]
            scores = torch.cat([rows.wait() for rows in second])
            loss = F.cross_entropy(scores, classes)
            dist.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def train_alone() -> list[float]:
    """Train in one process; return the losses."""
    model = nn.Sequential(Stage(0), Stage(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, classes = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        losses = train_in_stages(["worker1", f"worker{min(2, size - 1)}"])
        torch.testing.assert_close(losses, train_alone(), rtol=1e-9, atol=0)
        assert losses[-1] < 0.6 * losses[0]
        print(f"{MICROBATCHES} microbatches, two stages: {losses[0]:.3f} to {losses[-1]:.3f}")
    rpc.shutdown()


if __name__ == "__main__":
    main()
