"""A small Llama: RMSNorm, rotary attention, SwiGLU; written as for one process.

tokens [n, t] -> embedding -> L x [x + attention(norm(x)); x + mlp(norm(x))] -> norm -> scores
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 256, 64, 4, 128, 2, 32


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Rotary attention; how many heads there are here follows from what q, k and v give."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("angles", torch.cat([angles, angles], 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        q, k = (self._rotate(t) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _rotate(self, t: torch.Tensor) -> torch.Tensor:
        one, two = t.chunk(2, -1)
        return t * self.angles.cos() + torch.cat([-two, one], -1) * self.angles.sin()


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Tokens to scores of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [n, t] to [n, t, vocabulary]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
