"""The sharded optimizer against torch's own on gloo, step for step.

All ranks compute the same gradients, so that the order of sums plays no part: not a bit may differ.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dure as dist
from dure.testing import ProcessPool
from tests.parallel.optim.zero_models import KINDS, OPTIMIZERS, Net, batch, groups_of, same, step
from tests.parallel.torch_gloo import torch_group


def train(make: Callable[..., Any], name: str, **kind: bool) -> list[Any]:
    """Train with two groups, a scheduler and a group that comes later; return all that is seen."""
    cls, options = OPTIMIZERS[name]
    model = Net()
    late = list(model.out.parameters())
    groups = [
        {**g, "params": [p for p in g["params"] if all(p is not q for q in late)]}
        for g in groups_of(model)
    ]
    optimizer = make(groups, cls, **kind, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    data = torch.Generator().manual_seed(7)
    seen: list[Any] = []
    for turn in range(2):
        if turn == 1:
            optimizer.add_param_group({"params": late, "lr": 0.02})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen.append(step(model, optimizer, batch(data)))
        schedule.step()
        seen += [p.detach().clone() for p in model.parameters()]
    optimizer.consolidate_state_dict(to=0)
    seen.append(optimizer.state_dict() if optimizer.rank == 0 else {})
    return [*seen, optimizer.rank, [g["lr"] for g in optimizer.param_groups]]


def differing(rank: int, n: int, folder: str, runs: list[tuple[str, str]]) -> list[Any]:
    """Train with torch's and with ours; return the runs whose results differ."""
    with warnings.catch_warnings(action="ignore"):  # torch's module scripts functions
        torch_zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    with torch_group(rank, n, f"{folder}/store"):
        theirs = {name: train(torch_zero, name) for name in dict(runs)}
    found: list[Any] = []
    for name, kind in runs:
        ours = train(dist.ZeroRedundancyOptimizer, name, **KINDS[kind])
        dist.barrier()
        found += [] if same(ours, theirs[name]) else [(name, kind)]
    return found


@pytest.mark.parametrize(
    ("n", "runs"),
    [
        (2, [("adam", "straight"), ("adagrad", "shared"), ("adamw", "buckets")]),
        (3, [("momentum", "straight"), ("momentum", "shared"), ("momentum", "buckets")]),
    ],
)
def test_steps_and_states_are_those_of_torchs_on_gloo(
    process_pool: Callable[..., ProcessPool], tmp_path: Path, n: int, runs: list[tuple[str, str]]
) -> None:
    assert process_pool(n).run(differing, n, str(tmp_path), runs) == [[]] * n
