"""A small Llama with RMSNorm, rotary positions, grouped queries and SwiGLU; plans; training."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close as close

import dure
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard
from dure.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCAB, HEAD_DIM, HIDDEN, BLOCKS, STEPS = 16, 4, 48, 2, 3


_making = threading.Lock()


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Reads how many heads there are from what it is given, as one that is cut must."""

    def __init__(self, heads, kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, kv_heads
        dim, kv_dim = heads * HEAD_DIM, kv_heads * HEAD_DIM
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(dim, kv_dim, bias=False) for _ in range(2))

    def forward(self, x, rotation):
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for f in (self.wq, self.wk, self.wv)
        )
        q, k = (t * rotation.cos() + t.roll(t.shape[-1] // 2, -1) * rotation.sin() for t in (q, k))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden=HIDDEN):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, heads, kv_heads):
        super().__init__()
        dim = heads * HEAD_DIM
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention, self.feed_forward = Attention(heads, kv_heads), FeedForward(dim)

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, tied, heads, kv_heads):
        super().__init__()
        dim = heads * HEAD_DIM
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(heads, kv_heads) for _ in range(BLOCKS))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        speeds = 1.0 / 100 ** (torch.arange(HEAD_DIM) % (HEAD_DIM // 2) / HEAD_DIM)
        rotation = torch.outer(torch.arange(ids.shape[1]), speeds).to(self.norm.weight.dtype)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))


@functools.cache
def _made(tied, heads, kv_heads):
    torch.manual_seed(0)
    return Llama(tied, heads, kv_heads).double()


def small_llama(tied=False, heads=4, kv_heads=2):
    """The same model on every rank, in float64. Made once: thread-ranks share a generator."""
    with _making:
        return copy.deepcopy(_made(tied, heads, kv_heads))


def batches(count, size=2, length=24):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (size, length + 1), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# ---- plans ---------------------------------------------------------------------------------------


def tp_plan():
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def sp_plan():
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward": PrepareModuleInput(**gather),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def loss_plan():
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return {**sp_plan(), "output": head}


PLANS = {"tp": tp_plan, "sp": sp_plan, "loss": loss_plan}


# ---- training ------------------------------------------------------------------------------------


def whole(tensor):
    """What one rank alone would have in its place."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(model, part=lambda ids: ids, shown=whole):
    """Losses and gradients of all steps of AdamW, and the weights after them."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    for ids in batches(STEPS):
        with loss_parallel():
            loss = loss_of(model, part(ids))
            loss.backward()
        grads.append({name: whole(p.grad) for name, p in parameters.items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(shown(loss).item())
    return losses, grads, {name: whole(p) for name, p in parameters.items()}


@functools.cache
def trained_alone(tied=False, heads=4, kv_heads=2):
    """What `train` gives on one rank."""
    return train(small_llama(tied, heads, kv_heads))


def train_on(rank, shape, plan, tied=False, heads=4, kv_heads=2):
    """What `train` gives on a mesh: replicas along one axis, each cut along the other."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = parallelize_module(small_llama(tied, heads, kv_heads), mesh["tp"], PLANS[plan]())
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    if shape[0] == 1:
        return train(model)

    def average(loss):
        loss = whole(loss)
        dure.all_reduce(loss, dure.ReduceOp.AVG, group=mesh.get_group("dp"))
        return loss

    ddp = dure.DistributedDataParallel(model, mesh=mesh["dp"])
    mine = mesh.get_local_rank("dp")
    return train(ddp, part=lambda ids: ids.chunk(shape[0])[mine], shown=average)


def assert_trained_alike(got, expected):
    losses, grads, weights = expected
    assert got[0] == pytest.approx(losses, rel=1e-12)
    for step, (mine, wanted) in enumerate(zip(got[1], grads, strict=True)):
        for name, grad in wanted.items():
            close(mine[name], grad, rtol=1e-9, atol=1e-12, msg=f"gradient of {name}, step {step}")
    for name, weight in weights.items():
        close(got[2][name], weight, rtol=1e-9, atol=1e-10, msg=name)


def over_hosts(rank, folder):
    """Train on four ranks of two hosts, as on one rank; see tests/comm/over_hosts.py."""
    for shape in ((1, 4), (2, 2)):
        assert_trained_alike(
            train_on(rank, shape, "loss", heads=8, kv_heads=4), trained_alone(heads=8, kv_heads=4)
        )
