"""Models that several tests of DDP share."""

from __future__ import annotations

import torch
from torch import nn


class Branches(nn.Module):
    """Two layers, of which a forward uses those it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in names]).sum()
