"""DDP against torch's own on gloo, step for step, in two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist
from dure.testing import ProcessPool

STEPS = 6


class Net(nn.Module):
    """A small convolutional network with running statistics, dropout aside."""

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


def train(ddp: nn.Module, rank: int, kind: str) -> list[torch.Tensor]:
    """Train on this rank's data; return losses and, after each step, all parameters.

    Args:
        ddp: The module, wrapped.
        rank: Whose data.
        kind: "unused": parameters are used by all, one or none; "accumulate": the same, over two
            batches; "static": a layer is never used, and another one runs in a checkpoint.
    """
    no_sync: Callable[[], AbstractContextManager[None]] = getattr(ddp, "no_sync")  # noqa: B009
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    trace: list[torch.Tensor] = []
    for step in range(STEPS):
        x = torch.randn(4, 1, 4, 4, generator=generator)
        y = torch.randint(10, (4,), generator=generator)
        rare = kind != "static" and (step % 3 == rank or step == STEPS - 1)
        if kind == "accumulate" and step % 2 == 0:
            with no_sync():
                nn.functional.cross_entropy(ddp(x, rare), y).backward()
            continue
        loss = nn.functional.cross_entropy(ddp(x, rare), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trace += [loss.detach(), *(p.detach().clone() for p in ddp.state_dict().values())]
    return trace


def both(rank: int, folder: str, kind: str) -> float:
    """Train with both; return the largest difference between them."""
    torch.manual_seed(rank)  # other values on each rank: both must take rank 0's
    model = Net()
    model.reentrant = kind == "static"
    options: dict[str, Any] = {"static_graph": True}
    if kind != "static":
        options = {"find_unused_parameters": True}
    store = torch_dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        f"{folder}/{kind}", 2
    )
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        theirs = train(
            nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options),
            rank,
            kind,
        )
    finally:
        torch_dist.destroy_process_group()
    ours = train(
        dist.DistributedDataParallel(copy.deepcopy(model), **options),
        rank,
        kind,
    )
    assert len(ours) == len(theirs)
    return max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["unused", "accumulate", "static"])
def test_ddp_equals_torchs_on_gloo_step_for_step_2_ranks(
    process_pool: Callable[..., ProcessPool], tmp_path: Path, kind: str
) -> None:
    # With two ranks both average as (a + b) / 2, whatever the order: not a bit may differ.
    assert process_pool(2).run(both, str(tmp_path), kind) == [0.0, 0.0]
