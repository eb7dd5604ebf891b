"""DDP and gradients that wait or are missing: `no_sync`, several graphs, unused and frozen ones."""

from __future__ import annotations

import gc
import warnings
import weakref
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


def two_graphs_in_order(ddp: Any, x: torch.Tensor) -> None:
    first, second = ddp(x, 0), ddp(x, 1)
    first.backward()
    second.backward()


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
        (two_graphs_in_order, UNUSED, [3.0, 1.5, 1.5]),
        (evaluated_between, UNUSED, [1.5, 1.5, None]),
        (each_rank_its_task, UNUSED, [1.5, 0.5, 1.0]),
        (old_gradient, STATIC, [1.5, 1.5, 7.0]),
        (frozen, {}, [3.0, 1.5, None]),
    ],
)
@on_ranks(2)
def test_gradients_are_the_mean_of_what_the_ranks_have_2_ranks(
    rank: int, steps: Any, options: dict[str, Any], expected: list[float | None]
) -> None:
    ddp = dist.DistributedDataParallel(Tasks(), **options)
    steps(ddp, torch.full((1, 1), rank + 1.0))
    assert [None if p.grad is None else p.grad.item() for p in ddp.parameters()] == expected


def static_then_accumulated(ddp: Any, x: torch.Tensor) -> None:
    ddp(x, 1).backward()
    accumulated(ddp, x)


@pytest.mark.parametrize(("steps", "options"), [(dropped, {}), (static_then_accumulated, STATIC)])
@on_ranks(2)
def test_gradient_that_the_step_lacks_or_does_not_expect_is_named_2_ranks(
    rank: int, steps: Any, options: dict[str, Any]
) -> None:
    ddp = dist.DistributedDataParallel(Tasks(), **options)
    with pytest.raises(ModuleError) as caught:
        steps(ddp, torch.ones(1, 1))
    assert caught.value.parameters == ("heads.0.weight",)


def test_gradient_missing_on_one_rank_is_named_on_all_and_the_next_step_is_good_3_ranks() -> None:
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


def test_backward_that_reaches_no_parameter_is_named_too_2_ranks() -> None:
    class Bypass(nn.Linear):
        def forward(self, input: torch.Tensor, use: bool = True) -> torch.Tensor:
            return super().forward(input) if use else input * 2

    def rank_main(rank: int) -> tuple[str, ...]:
        ddp = dist.DistributedDataParallel(Bypass(2, 2))
        x = torch.ones(1, 2, requires_grad=True)
        with pytest.raises(ModuleError) as caught:
            ddp(x, rank == 0).sum().backward()
        return caught.value.parameters

    assert run_ranks(2, rank_main) == [("weight", "bias")] * 2


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_gradient_of_a_parameter_that_no_rank_used_is_kept_bit_by_bit_7_ranks() -> None:
    # The mean of seven equal numbers is not always that number, so averaging again would show.
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(1))

        def forward(self, both: bool) -> torch.Tensor:
            return (self.a * values).sum() + self.b.sum() if both else self.b.sum()

    def rank_main(rank: int) -> bool:
        ddp: Any = dist.DistributedDataParallel(Two(), **UNUSED)
        ddp(True).backward()
        before = ddp.module.a.grad.clone()
        ddp(False).backward()
        again = before.clone()
        dist.all_reduce(again, dist.ReduceOp.AVG)
        assert not torch.equal(again, before)
        return torch.equal(before, ddp.module.a.grad)

    assert run_ranks(7, rank_main) == [True] * 7


@on_ranks(1)
def test_needless_search_for_unused_parameters_is_a_warning_once_1_rank(rank: int) -> None:
    ddp = dist.DistributedDataParallel(nn.Linear(1, 1), **UNUSED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(torch.ones(1, 1)).sum().backward()
    assert len(caught) == 1


@on_ranks(2)
def test_parameters_that_are_never_used_are_left_out_if_asked_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(
        Branches(), bucket_cap_mb=1e-6, skip_all_reduce_unused_params=True, **UNUSED
    )
    for _ in range(2):
        ddp(torch.ones(1, 2), "left").backward()
    assert ddp._get_ddp_logging_data()["num_buckets_reduced"] == 1


@pytest.mark.parametrize("backward", [False, True])
def test_buckets_go_with_the_module_and_not_with_the_garbage_collector_1_rank(
    backward: bool,
) -> None:
    def rank_main(rank: int) -> list[Any]:
        ddp = dist.DistributedDataParallel(Tasks())
        loss = ddp(torch.ones(1, 1), 0, 1)
        if backward:
            loss.backward()
        kept = [weakref.ref(ddp.reducer), *(weakref.ref(b.flat) for b in ddp.reducer.buckets)]
        del ddp, loss
        return [ref() for ref in kept]

    gc.collect()
    gc.disable()
    try:
        assert set(run_ranks(1, rank_main)[0]) == {None}
    finally:
        gc.enable()


@on_ranks(2)
def test_backward_averages_though_no_variable_holds_the_wrapper_2_ranks(rank: int) -> None:
    module = nn.Linear(1, 1, bias=False)
    dist.DistributedDataParallel(module)(torch.full((1, 1), float(rank))).sum().backward()
    assert module.weight.grad.item() == 0.5
