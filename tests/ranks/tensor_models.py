"""A small Llama: RMSNorm, rotary positions, grouped queries, SwiGLU; the blocks that plans cut."""

from __future__ import annotations

import copy
import functools
import threading

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, KV_HEADS, HIDDEN = 16, 16, 4, 2, 32


_making = threading.Lock()


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Reads how many heads there are from what it is given, as one that is cut must."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV_HEADS, DIM // HEADS
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, rotation):
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for f in (self.wq, self.wk, self.wv)
        )
        q, k = (t * rotation.cos() + t.roll(t.shape[-1] // 2, -1) * rotation.sin() for t in (q, k))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(DIM), RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, blocks=2, tied=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        head_dim = DIM // HEADS
        speeds = 1.0 / 100 ** (torch.arange(head_dim) % (head_dim // 2) / head_dim)
        rotation = torch.outer(torch.arange(ids.shape[1]), speeds).to(self.dtype)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))

    @property
    def dtype(self):
        return next(self.parameters()).dtype


@functools.cache
def _made(tied):
    torch.manual_seed(0)
    return Llama(tied=tied).double()


def small_llama(tied=False):
    """The same model on every rank, in float64. Made once: thread-ranks share a generator."""
    with _making:
        return copy.deepcopy(_made(tied))


def batches(count, size=2, length=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (size, length + 1), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
