"""The sharded optimizer against torch's own on gloo, step for step.

All ranks compute the same gradients, so that the order of sums plays no part: not a bit may differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import dure as dist
from dure.testing import ProcessPool
from ranks.zero_models import Net, batch, groups_of, step

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's module scripts functions
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

STEPS = 3
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


def train(make: Callable[..., Any], name: str, **kind: bool) -> tuple[list[Any], dict[str, Any]]:
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
    for turn in range(STEPS):
        if turn == 1:
            optimizer.add_param_group({"params": late, "lr": 0.02})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen.append(step(model, optimizer, batch(data)))
        schedule.step()
        seen += [p.detach().clone() for p in model.parameters()]
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if optimizer.rank == 0 else {}
    seen += [optimizer.rank, [g["lr"] for g in optimizer.param_groups]]
    return seen, state


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Return where two pytrees differ."""
    if isinstance(ours, dict):
        if set(ours) != set(theirs):
            return [f"{where}: {list(ours)} and {list(theirs)}"]
        return [d for k in ours for d in differences(ours[k], theirs[k], f"{where}.{k}")]
    if isinstance(ours, list):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} and {len(theirs)}"]
        return [d for i, o in enumerate(ours) for d in differences(o, theirs[i], f"{where}[{i}]")]
    if isinstance(ours, torch.Tensor):
        return [] if torch.equal(ours, theirs) and ours.dtype == theirs.dtype else [where]
    return [] if ours == theirs else [f"{where}: {ours} and {theirs}"]


def compare(rank: int, n: int, folder: str, names: list[str], kinds: list[str]) -> list[str]:
    """Train with torch's and with ours, in some of its ways; return what differs."""
    theirs: dict[str, Any] = {}
    store = torch_dist.FileStore(f"{folder}/store", n)  # pyright: ignore
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    try:
        for name in names:
            theirs[name] = train(TorchZero, name)
    finally:
        torch_dist.destroy_process_group()
    found: list[str] = []
    for name in names:
        for kind in kinds:
            ours = train(dist.ZeroRedundancyOptimizer, name, **({kind: True} if kind else {}))
            dist.barrier()
            found += differences(list(ours), list(theirs[name]), f"{name} {kind}")
    return found


@pytest.mark.parametrize(
    ("n", "names", "kinds"),
    [
        (2, [*OPTIMIZERS], ["", "host_shared_parameters"]),
        (3, ["adamw"], ["", "parameters_as_bucket_view"]),
        (4, ["momentum"], ["", "host_shared_parameters"]),
    ],
)
def test_steps_and_states_are_those_of_torchs_on_gloo(
    process_pool: Callable[..., ProcessPool],
    tmp_path: Path,
    n: int,
    names: list[str],
    kinds: list[str],
) -> None:
    found = process_pool(n).run(compare, n, str(tmp_path), names, kinds)
    assert found == [[]] * n
