"""Row 3: `fully_shard`, one step of a sharded model, tensor parallelism, and redistribution.

One process is a rank in the middle of a world of the backend "fake". A model of `LAYERS` blocks on
the meta device is sharded over one axis of all ranks; so is a smaller one of `FAKE_LAYERS` blocks
whose tensors have no values (`FakeTensorMode`), which makes steps. Small tensors with values are
redistributed between all placements, evenly and unevenly cut.

Counted are ATen operators, calls of functions, and bytes of Python objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from counting import peak_bytes, processor_time
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dure
from dure import fsdp
from dure.mesh import DeviceMesh, init_device_mesh
from dure.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TITLE = "sharding a model, one step, and DTensor, one rank"
RANKS = (16, 256, 1024, 10_000)
LAYERS, WIDTH = 80, 10_240
FAKE_LAYERS = 8
FACTOR = 4
"""Of the width of a block within."""


class Operators(TorchDispatchMode):
    """Counts ATen operators."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FACTOR * WIDTH), nn.Linear(FACTOR * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@contextmanager
def calls(figures: dict[str, float], name: str) -> Iterator[None]:
    """Count the calls of functions, of Python and C, in a block."""
    num = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        figures[name] = num


def measure(ranks: int) -> dict[str, float]:
    """Count what one rank does."""
    figures: dict[str, float] = {}
    dure.init_process_group("fake", rank=ranks // 2, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    sharded(mesh, 1)()  # what is imported at the first use
    with processor_time(figures, "CPU s of all, first time"):
        sharded(mesh, LAYERS)()
        parallelized(mesh, LAYERS)()
        step_of(mesh)()
    for name, run in (("fully_shard", sharded), ("parallelize_module", parallelized)):
        figures[f"bytes kept per layer, {name}"] = peak_bytes(run(mesh, LAYERS))[0] / LAYERS
        with calls(figures, f"calls, {name}"):
            run(mesh, LAYERS)()
    step = step_of(mesh)
    step()
    with Operators() as seen:
        step()
    figures["operators, a step"] = seen.num
    with calls(figures, "calls, a step"):
        step()
    figures["bytes at their peak, a step"] = peak_bytes(step)[1]
    moves = redistributions(mesh)
    moves()
    with calls(figures, "calls, redistributions"):
        moves()
    return figures


def sharded(mesh: DeviceMesh, layers: int) -> Callable[[], nn.Module]:
    """Return a function that shards a new model on the meta device over all ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(layers)))

    def run() -> nn.Module:
        for block in model:
            fsdp.fully_shard(block, mesh=mesh)
        return fsdp.fully_shard(model, mesh=mesh)

    return run


def parallelized(mesh: DeviceMesh, layers: int) -> Callable[[], nn.Module]:
    """Return a function that cuts the layers of a new model on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(layers)))

    def run() -> nn.Module:
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)

    return run


def step_of(mesh: DeviceMesh) -> Callable[[], None]:
    """Return a function that makes a step of a new model, whose tensors have no values."""
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(*(Block() for _ in range(FAKE_LAYERS)))
        for block in model:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.ones(2, WIDTH)

    def step() -> None:
        with mode:
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def redistributions(mesh: DeviceMesh) -> Callable[[], None]:
    """Return a function that redistributes tensors between all placements."""
    ranks = mesh.size()
    # The second shape is cut unevenly, the third along its last dimension.
    tensors = [torch.ones(2 * ranks, 2), torch.ones(2 * ranks + 1, 2), torch.ones(2, 2 * ranks)]

    def run() -> None:
        for tensor in tensors:
            dim = 0 if tensor.shape[0] > tensor.shape[1] else 1
            shard = distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
            shard.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(dim)])
            shard.redistribute(placements=[Shard(1 - dim)])
            DTensor.from_local(tensor, mesh, [Partial()]).redistribute(placements=[Shard(dim)])

    return run
