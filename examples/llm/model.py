"""A Llama-shaped language model: RMSNorm, rotary grouped-query attention, SwiGLU.

tokens [n, t] -> embedding -> L x [x + attention(norm(x)); x + mlp(norm(x))] -> norm -> scores

It is written as for one process, and knows nothing of ranks but two things: which layers it has
(`part`: a stage of a pipeline has some of them), and which positions of the sequence it is given
(`positions`: a rank of a context parallel group has some of them).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dure.tensor import Replicate, Shard
from dure.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Args:
        vocabulary: Tokens that there are.
        width: Features of an activation.
        layers: How many.
        heads: Of the queries; divides `width`.
        groups: Of the keys and values; divides `heads`.
        hidden: Units of a layer's MLP.
        length: Of the longest sequence.
        theta: Base of the rotations' wavelengths.
    """

    vocabulary: int = 256
    width: int = 64
    layers: int = 8
    heads: int = 8
    groups: int = 4
    hidden: int = 128
    length: int = 32
    theta: float = 10_000.0


SHAPES = {
    "debug": Shape(),
    "10m": Shape(width=320, layers=8, heads=8, groups=4, hidden=864, length=256),
    "1b": Shape(128_256, 2048, 16, 32, 8, 8192, 8192, 500_000.0),
    "8b": Shape(128_256, 4096, 32, 32, 8, 14_336, 8192, 500_000.0),
}


class Attention(nn.Module):
    """Causal attention; how many heads there are here follows from what q, k and v give."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.q, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (
            nn.Linear(shape.width, shape.groups * self.size, bias=False) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape; `turns` [2, t, size] are cosines and sines."""
        q, k, v = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            rotated(q, turns), rotated(k, turns), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


def angles(shape: Shape, positions: torch.Tensor) -> torch.Tensor:
    """Return the cosines and sines for positions [t], as [2, t, features of a head]."""
    size = shape.width // shape.heads
    speeds = shape.theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turned = torch.outer(positions.double(), speeds).repeat(1, 2)
    return torch.stack([turned.cos(), turned.sin()])


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features (i, i + size / 2) of [n, heads, t, size] by its angle."""
    one, two = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-two, one], -1) * turns[1]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.width, 1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Some layers of the model; the first ones with the embedding, the last with the scores.

    Args:
        shape: The sizes of the whole.
        part: Which layers; all where None.
        positions: Of the tokens that it will be given, int64 [t]; all of `shape.length` where None.
    """

    def __init__(
        self,
        shape: Shape,
        part: Iterable[int] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        numbers = range(shape.layers) if part is None else list(part)
        self.embed = nn.Embedding(shape.vocabulary, shape.width) if 0 in numbers else None
        self.layers = nn.ModuleDict({str(i): Layer(shape) for i in numbers})
        if shape.layers - 1 in numbers:
            self.norm = nn.RMSNorm(shape.width, 1e-5)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        else:
            self.norm = self.head = None
        self.shape = shape
        self.positions = torch.arange(shape.length) if positions is None else positions
        self.register_buffer("turns", angles(shape, self.positions), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [n, t] or activations [n, t, width] to activations, or scores."""
        if self.embed is not None:
            x = self.embed(x)
        turns = self.turns.to(x.dtype)
        for layer in self.layers.values():
            x = layer(x, turns)
        return x if self.head is None else self.head(self.norm(x))

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Fill parameters with values that depend on their names alone, not on `part`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**40)
            deep = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (2 * self.shape.layers) ** 0.5 if deep else 0.02
            parameter.normal_(0.0, std, generator=generator)


def plan(model: Llama) -> dict[str, ParallelStyle]:
    """Return how layers are divided along an axis of tensor and sequence parallel ranks."""
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    first = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    last = {
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    layers: dict[str, ParallelStyle] = {
        "layers.*.*_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp": PrepareModuleInput(**gather),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return layers | (first if model.embed else {}) | (last if model.head else {})
