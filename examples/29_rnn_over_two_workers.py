"""An LSTM over two workers: its table and its decoder here, the cells there, one backward for all.

Worker 1 holds the embedding and the decoder, worker 0 the LSTM and the loop. A forward pass goes
over and back twice; within `dist.autograd.context()` every call leaves its mark in the graph, so
that `dist.autograd.backward` follows it over both processes. Gradients are kept by the context and
not in `.grad`, and `DistributedOptimizer` steps where the weights are.

How can one know that it is right? One process with the same weights has the same losses.

    dure run --nproc 2 examples/29_rnn_over_two_workers.py          (more workers look on)
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import dure as dist
from dure import rpc
from dure.optim import DistributedOptimizer

TOKENS, WIDTH, ROWS, LENGTH, STEPS = 12, 24, 8, 10, 40


class Ends(nn.Module):
    """The two ends of the model: tokens to vectors, and vectors to scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(TOKENS, WIDTH, dtype=torch.float64)
        self.decoder = nn.Linear(WIDTH, TOKENS, dtype=torch.float64)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [t, n] to vectors [t, n, width]."""
        return self.embedding(tokens)

    def decode(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [t, n, width] to scores of the next token [t, n, tokens]."""
        return self.decoder(states)

    def parameter_references(self) -> list[rpc.RRef]:
        """Return a reference to each parameter."""
        return [rpc.RRef(p) for p in self.parameters()]


class Model(nn.Module):
    """The whole: an LSTM here, and the ends, wherever they are.

    Args:
        ends: Stands for an `Ends`: itself, or a remote reference's proxy.
    """

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.ends = [ends]  # in a list: not a part of this module
        self.lstm = nn.LSTM(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of foretelling each token of [t + 1, n] but the first."""
        states, _ = self.lstm(self.ends[0].embed(tokens[:-1]))
        scores = self.ends[0].decode(states)
        return F.cross_entropy(scores.flatten(0, 1), tokens[1:].flatten())


def batch(step: int) -> torch.Tensor:
    """Return sequences that count up from somewhere, in steps of 1 or 5: [t + 1, n]."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(TOKENS, (ROWS,), generator=generator)
    pace = 1 + 4 * torch.randint(2, (ROWS,), generator=generator)
    return (first + pace * torch.arange(LENGTH + 1)[:, None]) % TOKENS


def train_over_two() -> list[float]:
    """Train with the ends on worker 1; return the losses."""
    there = rpc.remote("worker1", Ends)
    model = Model(there.rpc_sync())
    here = [rpc.RRef(p) for p in model.parameters()]
    everything = here + there.rpc_sync().parameter_references()
    optimizer = DistributedOptimizer(torch.optim.Adam, everything, lr=0.02)
    losses = []
    for step in range(STEPS):
        with dist.autograd.context() as context:
            loss = model(batch(step))
            dist.autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters())
    return losses


def train_alone() -> list[float]:
    """Train in one process; return the losses."""
    ends = Ends()
    model = Model(ends)
    optimizer = torch.optim.Adam([*model.parameters(), *ends.parameters()], lr=0.02)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        losses = train_over_two()
        torch.testing.assert_close(losses, train_alone(), rtol=1e-9, atol=0)
        assert losses[-1] < 0.5 * losses[0]
        print(f"loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}, as in one process")
    rpc.shutdown()


if __name__ == "__main__":
    main()
