"""Models that several tests of DDP share."""

from __future__ import annotations

import torch
from torch import nn


class Branches(nn.Module):
    """Two layers, of which a forward uses those whose names it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in names]).sum()


class Layers(nn.Module):
    """Layers of which a forward uses those whose numbers it gets; the gradient of each is `x`."""

    def __init__(self, n: int = 2, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))

    def forward(self, x: torch.Tensor, *use: int) -> torch.Tensor:
        return torch.stack([self.layers[i](x).sum() for i in use]).sum()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Return copies of the gradients that there are."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]
