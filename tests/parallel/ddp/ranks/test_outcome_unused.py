"""DDP and gradients that wait or are missing: `no_sync`, several graphs, unused and frozen ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.ddp.ddp_models import Branches
from tests.thread_ranks import on_ranks

UNUSED: dict[str, Any] = {"find_unused_parameters": True}
STATIC: dict[str, Any] = {"static_graph": True}


class Tasks(nn.Module):
    """A body and one head for each task; a gradient is the input times the weight above."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, *tasks: int) -> torch.Tensor:
        return torch.stack([(self.heads[task].weight * self.body(x)).sum() for task in tasks]).sum()


def one_task_without_sync(ddp: Any, x: torch.Tensor) -> None:
    with ddp.no_sync():
        ddp(x, 0).backward()


def accumulated(ddp: Any, x: torch.Tensor) -> None:
    one_task_without_sync(ddp, x)
    ddp(x, 1).backward()


def dropped(ddp: Any, x: torch.Tensor) -> None:
    one_task_without_sync(ddp, x)
    ddp.zero_grad()
    ddp(x, 1).backward()


def replaced(ddp: Any, x: torch.Tensor) -> None:
    one_task_without_sync(ddp, x)
    ddp.module.heads[0].weight.grad = 10 * x
    ddp(x, 1).backward()


def two_graphs(ddp: Any, x: torch.Tensor) -> None:
    ddp(x, 1).backward()
    ddp.zero_grad()
    first, second = ddp(x, 0), ddp(x, 1)
    second.backward()
    first.backward()


def evaluated_between(ddp: Any, x: torch.Tensor) -> None:
    ddp(x, 1).backward()
    ddp.zero_grad()
    loss = ddp(x, 0)
    with torch.no_grad():
        ddp(x, 1)
    loss.backward()


def each_rank_its_task(ddp: Any, x: torch.Tensor) -> None:
    ddp(x, int(x) - 1).backward()


def old_gradient(ddp: Any, x: torch.Tensor) -> None:
    ddp.module.heads[1].weight.grad = torch.full((1, 1), 7.0)
    for _ in range(3):
        ddp.module.body.weight.grad = ddp.module.heads[0].weight.grad = None
        ddp(x, 0).backward()


def frozen(ddp: Any, x: torch.Tensor) -> None:
    ddp.module.heads[1].weight.requires_grad_(False)
    ddp(x, 0, 1).backward()


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (accumulated, {}, [3.0, 1.5, 1.5]),
        (dropped, UNUSED, [1.5, None, 1.5]),
        (replaced, {}, [3.0, 15.0, 1.5]),
        (two_graphs, UNUSED, [3.0, 1.5, 1.5]),
        (evaluated_between, UNUSED, [1.5, 1.5, None]),
        (each_rank_its_task, UNUSED, [1.5, 0.5, 1.0]),
        (old_gradient, STATIC, [1.5, 1.5, 7.0]),
        (frozen, {}, [3.0, 1.5, None]),
    ],
)
@on_ranks(2)
def test_gradients_are_the_mean_of_what_the_ranks_have_2_ranks(rank, steps, options, expected):
    ddp = dist.DistributedDataParallel(Tasks(), **options)
    steps(ddp, torch.full((1, 1), rank + 1.0))
    assert [None if p.grad is None else p.grad.item() for p in ddp.parameters()] == expected


def static_then_accumulated(ddp: Any, x: torch.Tensor) -> None:
    ddp(x, 1).backward()
    accumulated(ddp, x)


@pytest.mark.parametrize(("steps", "options"), [(dropped, {}), (static_then_accumulated, STATIC)])
@on_ranks(2)
def test_gradient_that_the_step_lacks_or_does_not_expect_is_named_2_ranks(rank, steps, options):
    ddp = dist.DistributedDataParallel(Tasks(), **options)
    with pytest.raises(ModuleError) as caught:
        steps(ddp, torch.ones(1, 1))
    assert caught.value.parameters == ("heads.0.weight",)


def test_gradient_missing_on_one_rank_is_named_on_all_and_the_next_step_is_good_3_ranks():
    def rank_main(rank: int) -> ModuleError:
        ddp = dist.DistributedDataParallel(Branches(), bucket_cap_mb=1e-6)
        names = ("left",) if rank == 1 else ("left", "right")
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 2), *names).backward()
        ddp(torch.ones(1, 2), "left", "right").backward()
        return caught.value

    for error in run_ranks(3, rank_main):
        assert error.parameters == ("right.weight",)
        assert "right.weight (on rank 1)" in error.seen


@on_ranks(2)
def test_parameters_that_are_never_used_are_left_out_if_asked_2_ranks(rank):
    ddp = dist.DistributedDataParallel(
        Branches(), bucket_cap_mb=1e-6, skip_all_reduce_unused_params=True, **UNUSED
    )
    for _ in range(2):
        ddp(torch.ones(1, 2), "left").backward()
    assert ddp._get_ddp_logging_data()["num_buckets_reduced"] == 1
