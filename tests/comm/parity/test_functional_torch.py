"""`dure.nn.functional` and `dure.comm.functional` against torch's own over Gloo."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.nn.functional as torch_nn
from torch.distributed import _functional_collectives as torch_functional

import dure
import dure.comm.functional
import dure.nn.functional
from tests.waiting import PATIENCE_S


def programs(F: Any, nn: Any, group: Any, rank: int, n: int) -> dict[str, Any]:
    """Each: a differentiable function of x [2n, n], alike in both libraries."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    even = [2] * n
    return {
        "all_reduce": nn.all_reduce,
        "broadcast": lambda x: nn.broadcast(x, 1),
        "reduce": lambda x: nn.reduce(x, 1) * (rank == 1),  # torch leaves anything elsewhere
        "gather": lambda x: torch.cat(nn.gather(x, 1)),
        "scatter": lambda x: nn.scatter(list(x.chunk(n)), 1),
        "all_gather": lambda x: torch.stack(nn.all_gather(x)),
        "reduce_scatter": lambda x: nn.reduce_scatter(like(x[:2]), list(x.chunk(n))),
        "all_to_all": lambda x: torch.cat(
            nn.all_to_all([like(x[:2]) for _ in range(n)], list(x.chunk(n)))
        ),
        "all_to_all_single": lambda x: nn.all_to_all_single(like(x), x),
        "F.all_reduce": lambda x: F.all_reduce(x, "sum", group),
        "F.broadcast": lambda x: F.broadcast(x.detach(), 1, group) + x,  # no gradient in torch
        "F.all_gather": lambda x: F.all_gather_tensor(x, 0, group),
        "F.all_gather dim 1": lambda x: F.all_gather_tensor(x, 1, group),
        "F.reduce_scatter": lambda x: F.reduce_scatter_tensor(x, "sum", 0, group),
        "F.reduce_scatter dim 1": lambda x: F.reduce_scatter_tensor(x, "sum", 1, group),
        "F.all_to_all": lambda x: F.all_to_all_single(x, even, even, group),
        "F.permute": lambda x: F.permute_tensor(
            x.reshape(-1), [(r + 1) % n for r in range(n)], group
        ),
    }


def run(F: Any, nn: Any, group: Any, rank: int, n: int) -> dict[str, list[torch.Tensor]]:
    """Return each program's value and gradient; inputs are integers, so sums are exact."""
    found = {}
    for name, program in programs(F, nn, group, rank, n).items():
        generator = torch.Generator().manual_seed(100 + rank)
        x = torch.randint(-4, 5, (2 * n, n), generator=generator).double().requires_grad_()
        y = program(x)
        weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).reshape(y.shape) + rank
        (y * weights).sum().backward()
        found[name] = [y.detach(), x.grad]
    return found


def both(rank: int, n: int, folder: str) -> list[str]:
    ours = run(dure.comm.functional, dure.nn.functional, dure.group.WORLD, rank, n)
    store = torch_dist.FileStore(f"{folder}/torch", n)  # pyright: ignore[reportPrivateImportUsage]
    limit = timedelta(seconds=PATIENCE_S)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 warns of nearly all of these names
            theirs = run(torch_functional, torch_nn, torch_dist.group.WORLD, rank, n)
    finally:
        torch_dist.destroy_process_group()
    return [
        f"{name}: {ours[name]} {theirs[name]}"
        for name in ours
        if not all(map(torch.equal, ours[name], theirs[name]))
    ]


@pytest.mark.parametrize("n", [2, 3])
def test_values_and_gradients_equal_torchs(process_pool, tmp_path, n):
    assert process_pool(n, None).run(both, n, str(tmp_path)) == [[]] * n
