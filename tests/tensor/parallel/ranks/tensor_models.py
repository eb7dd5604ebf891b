"""The Llama of examples/llm, small: plans, and its training on one rank and on several."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing import assert_close as close

import dure
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard
from dure.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from tests.parallel.ranks.llm_program import train as program

llm: Any = sys.modules[program.Llama.__module__]  # examples/llm/model.py

VOCAB, HEAD_DIM, HIDDEN, BLOCKS, STEPS, LENGTH = 16, 4, 48, 2, 3, 24


_making = threading.Lock()


@functools.cache
def _made(tied, heads, kv_heads):
    torch.manual_seed(0)
    dim = heads * HEAD_DIM
    model: Any = llm.Llama(llm.Shape(VOCAB, dim, BLOCKS, heads, kv_heads, HIDDEN, LENGTH)).double()
    for layer in model.layers.values():
        layer.attention.n_heads, layer.attention.n_kv_heads = heads, kv_heads
    if tied:
        model.head.weight = model.embed.weight
    return model


def small_llama(tied=False, heads=4, kv_heads=2):
    """The same model on every rank, in float64. Made once: thread-ranks share a generator."""
    with _making:
        return copy.deepcopy(_made(tied, heads, kv_heads))


def batches(count, size=2, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (size, length + 1), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# ---- plans ---------------------------------------------------------------------------------------


def tp_plan():
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.mlp.[gu]*": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def loss_plan():
    return llm.plan(small_llama())


def sp_plan():
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return {**loss_plan(), "head": head}


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
        grads.append({n: whole(p.grad) for n, p in parameters.items() if p.grad is not None})
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
    assert (model.head.weight is model.embed.weight) == tied
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
    close(got[0], expected[0], rtol=1e-12, atol=0)
    close(got[1], expected[1], rtol=1e-9, atol=1e-12)
    close(got[2], expected[2], rtol=1e-9, atol=1e-10)


def over_hosts(rank, folder):
    """Train on four ranks of two hosts, as on one rank; see tests/comm/over_hosts.py."""
    for shape in ((1, 4), (2, 2)):
        assert_trained_alike(
            train_on(rank, shape, "loss", heads=8, kv_heads=4), trained_alone(heads=8, kv_heads=4)
        )
