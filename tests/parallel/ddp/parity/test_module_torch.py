"""DDP against torch's own on gloo, step for step, in two processes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist
from tests.parallel.torch_gloo import torch_group

STEPS = 4


class Net(nn.Module):
    """A small convolutional network with running statistics, and a layer that is rarely used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 16, 10)
        self.rare = nn.Linear(10, 10)
        self.reentrant = False

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        z = torch.relu(self.norm(self.conv(x))).flatten(1)
        y = checkpoint(self.out, z, use_reentrant=True) if self.reentrant else self.out(z)
        return self.rare(y) if rare else y


def train(ddp: Any, rank: int, kind: str) -> list[torch.Tensor]:
    """Train on this rank's data; return losses and, after each step, all parameters.

    Args:
        ddp: The module, wrapped.
        rank: Whose data.
        kind: "unused": parameters are used by all, one or none; "accumulate": the same, over two
            batches; "static": a layer is never used, and another one runs in a checkpoint.
    """
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    trace: list[torch.Tensor] = []
    for step in range(STEPS):
        x = torch.randn(4, 1, 4, 4, generator=generator)
        y = torch.randint(10, (4,), generator=generator)
        rare = kind != "static" and (step % 3 == rank or step == STEPS - 1)
        accumulates = kind == "accumulate" and step % 2 == 0
        with ddp.no_sync() if accumulates else nullcontext():
            loss = nn.functional.cross_entropy(ddp(x, rare), y)
            loss.backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
            trace += [loss.detach(), *(p.detach().clone() for p in ddp.state_dict().values())]
    return trace


def both(rank: int, folder: str, kind: str) -> int:
    """Train with both; return how many tensors differ in any bit."""
    torch.manual_seed(rank)  # other values on each rank: both must take rank 0's
    model = Net()
    model.reentrant = kind == "static"
    option = "static_graph" if kind == "static" else "find_unused_parameters"
    options: dict[str, Any] = {option: True}
    with torch_group(rank, 2, f"{folder}/store"):
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options)
        theirs = train(wrapped, rank, kind)
    ours = train(dist.DistributedDataParallel(copy.deepcopy(model), **options), rank, kind)
    return sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["unused", "accumulate", "static"])
def test_ddp_equals_torchs_on_gloo_step_for_step_2_ranks(process_pool, tmp_path, kind):
    # With two ranks both average as (a + b) / 2, whatever the order: not a bit may differ.
    assert process_pool(2).run(both, str(tmp_path), kind) == [0, 0]
