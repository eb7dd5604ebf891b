"""Torch's own ways of training in parallel, unchanged, on "dure" and on "gloo": the same numbers.

Each program below runs in two processes, once on each backend, and returns tensors. With two ranks
a sum is a + b whatever the order, so not a bit may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dure.torch_backend  # noqa: F401 (registers the backend)
from dure.testing import ProcessPool

td: Any = torch.distributed
Tensors = list[torch.Tensor]
_numbers = itertools.count()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))


def _train(module: Any, rank: int, steps: int = 3) -> Tensors:
    """Train on this rank's data; return the losses."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses: Tensors = []
    for _ in range(steps):
        loss = module(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _full(module: nn.Module) -> Tensors:
    states = module.state_dict().values()
    return [s.full_tensor() if isinstance(s, DTensor) else s.detach().clone() for s in states]


def ddp(rank: int) -> Tensors:
    """DDP with many small buckets, a view of them as gradients, and uneven inputs."""
    model = nn.parallel.DistributedDataParallel(
        _model(), bucket_cap_mb=1e-4, gradient_as_bucket_view=True
    )
    losses = _train(model, rank)
    with model.join():
        losses += _train(model, rank, steps=1 + rank)[:1]
    return losses + _full(model)


def ddp_hooks(rank: int) -> Tensors:
    """DDP whose gradients go through communication hooks, which chain futures."""
    out: Tensors = []
    for hook, state in (
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
    ):
        model = nn.parallel.DistributedDataParallel(_model())
        model.register_comm_hook(state, hook)
        out += _train(model, rank, steps=4) + _full(model)
    return out


def fsdp(rank: int) -> Tensors:
    """FSDP2 by layers, in mixed precision, with gradient clipping across ranks."""
    mesh = init_device_mesh("cpu", (2,))
    model: Any = _model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    losses = _train(model, rank)
    model(torch.ones(2, 6)).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [*losses, norm.full_tensor(), *_full(model)]


def tensor_parallel(rank: int) -> Tensors:
    """Tensor parallelism of two layers."""
    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return _train(model, 0) + _full(model)


def functions(rank: int) -> Tensors:
    """Functional collectives, eager."""
    group = td.group.WORLD
    x = torch.arange(4.0) + rank
    return [
        functional.all_reduce(x, "sum", group) + 0,
        functional.all_gather_tensor(x, 0, group) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        functional.all_to_all_single(x, None, None, group) + 0,
        functional.broadcast(x, 1, group) + 0,
        *functional.all_reduce_coalesced([x, x * 2], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x * 3], group),
        *functional.reduce_scatter_tensor_coalesced([x, x * 3], "sum", [0, 0], group),
    ]


def objects(rank: int) -> Tensors:
    """Objects, and every collective with a list."""
    gathered: list[Any] = [None, None]
    td.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    sent = ["a", 1] if rank == 0 else [None, None]
    td.broadcast_object_list(sent, src=0)
    assert sent == ["a", 1]
    mine: list[Any] = [None]
    td.scatter_object_list(mine, ["zero", "one"] if rank == 0 else None, src=0)
    assert mine == [["zero", "one"][rank]]
    x = torch.arange(2.0) + rank
    out = [torch.empty(2) for _ in range(2)]
    td.all_to_all(out, [x, x * 2])
    part = torch.empty(2)
    td.reduce_scatter(part, [x, x + 1])
    td.gather(x, [torch.empty(2) for _ in range(2)] if rank == 1 else None, dst=1)
    td.reduce(x, dst=0)
    return [*out, part, x if rank == 0 else part]


PROGRAMS = [ddp, ddp_hooks, fsdp, tensor_parallel, functions, objects]


def both(rank: int, program: Callable[[int], Tensors], folder: str) -> None:
    """Run the program on both backends, and compare bit by bit."""
    results: list[Tensors] = []
    for backend in ("gloo", "dure"):
        store = td.FileStore(f"{folder}/{next(_numbers)}", 2)
        td.init_process_group(backend, store=store, rank=rank, world_size=2)
        try:
            results.append([t.detach().clone() for t in program(rank)])
            td.barrier()
        finally:
            with suppress(ValueError):
                td.destroy_process_group()
    theirs, ours = results
    assert len(ours) == len(theirs) > 0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"result {i}: {a} on dure, {b} on gloo"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_same_as_on_gloo(
    program: Callable[[int], Tensors], process_pool: Callable[..., ProcessPool], tmp_path: Path
) -> None:
    process_pool(2, "shm").run(both, program, str(tmp_path))
