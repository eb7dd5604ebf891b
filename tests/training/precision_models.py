"""What the tests of mixed precision train."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist

BF16 = dist.MixedPrecision(param_dtype=torch.bfloat16)


class Net(nn.Module):
    """Layers of several kinds, with a tied weight, a shared layer and a part to checkpoint."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.recompute = recompute
        self.seen: list[torch.dtype] = []

    def tied(self) -> torch.Tensor:
        first = self.body[0]
        assert isinstance(first, nn.Linear)
        return first.weight

    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return nn.functional.linear(self.body(self.body(x)), self.tied())

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        x = self.embed(tokens) * scale
        if self.recompute is None:
            x = self.part(x)
        else:
            x = checkpoint(self.part, x, use_reentrant=self.recompute)
        return nn.functional.linear(self.rnn(x)[0], self.embed.weight)


def made(recompute: bool | None = None) -> Net:
    net = Net(recompute)
    generator = torch.Generator().manual_seed(3)  # of its own: the ranks are threads
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return net


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
