"""A small GPT for the examples that train on text: embeddings, layers, a head.

    tokens [n, t] -> embedding + position -> L x [x + attention(norm(x)); x + mlp(norm(x))]
                  -> norm -> scores of the next token [n, t, vocabulary]

Nothing in it is random once it is built (no dropout), so what it learns does not depend on which
rank held which part of a batch. `SIZES` are those of the examples' option --size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is: layers, attention heads, width, and the longest text it can see."""

    layers: int
    heads: int
    width: int
    context: int


SIZES: dict[str, Size] = {
    "small": Size(layers=3, heads=4, width=96, context=64),  # 0.4 M parameters
    "gpt10m": Size(layers=6, heads=6, width=384, context=128),  # 10.8 M
}


class Block(nn.Module):
    """One layer: each token looks at those before it, then is transformed by itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, t, width] to the same shape."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each token with the earlier ones, by how well its query fits their keys."""
        n, t, width = x.shape
        heads = self.qkv(x).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [n, heads, t, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class GPT(nn.Module):
    """The model; `vocabulary` is how many different tokens there are."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.context = size.context
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # the sum of all layers' outputs shall be as large as one input
                shrink = (2 * size.layers) ** -0.5 if "out." in name or "mlp.2" in name else 1.0
                nn.init.normal_(p, std=0.02 * shrink)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores [n, t, vocabulary] for tokens [n, t], t at most the context."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in nats a token, of scores [n, t, vocabulary] for targets [n, t]."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def continued(model: GPT, tokens: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Write on: return `tokens` [t] and `count` more, each drawn by the model's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        scores = model(tokens[None, -model.context :])[0, -1]
        chosen = torch.multinomial((scores / 0.8).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, chosen])
    return tokens
