"""What the tests of `Join` train: a network, batches, and the same in one process alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Params = list[torch.Tensor]


def make_net() -> nn.Sequential:
    """Return the same network each time (thread-ranks share torch's generator: not by its seed)."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        nn.init.uniform_(p, -1.0, 1.0, generator=generator)
    return net


def batches_of(rank: int, count: int, epoch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def train_alone(counts: Sequence[int], by_all: bool, epochs: int) -> Params:
    """Train in one process as ranks with `counts` batches each are to train together."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        data = [batches_of(rank, count, epoch) for rank, count in enumerate(counts)]
        for step in range(max(counts)):
            optimizer.zero_grad()
            present = [d[step] for d in data if step < len(d)]
            total = torch.stack([loss_of(net(x)) for x in present]).sum()
            (total / (len(counts) if by_all else len(present))).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def assert_all_close(results: Sequence[Params], expected: Params) -> None:
    """Require that every rank has the expected parameters."""
    for params in results:
        torch.testing.assert_close(params, expected, atol=1e-13, rtol=1e-13)
