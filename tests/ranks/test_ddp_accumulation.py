"""DDP and gradients that wait: dropped after `no_sync`, several graphs at once, what lives on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks


class Tasks(nn.Module):
    """A body and one head for each task; a gradient is the input times the weight above."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return (self.heads[task].weight * self.body(x)).sum()


def inputs(rank: int) -> torch.Tensor:
    return torch.full((1, 1), rank + 1.0)


def gradients(module: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


def test_gradients_dropped_after_no_sync_do_not_come_back_2_ranks() -> None:
    def rank_main(rank: int) -> list[float | None]:
        ddp = dist.DistributedDataParallel(Tasks(), find_unused_parameters=True)
        with ddp.no_sync():
            ddp(inputs(rank), 0).backward()
        ddp.zero_grad()
        ddp(inputs(rank), 1).backward()
        return gradients(ddp)

    assert run_ranks(2, rank_main) == [[1.5, None, 1.5]] * 2


def test_gradients_dropped_after_no_sync_are_missed_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ddp = dist.DistributedDataParallel(Tasks())
        with ddp.no_sync():
            ddp(inputs(rank), 0).backward()
        ddp.zero_grad()
        with pytest.raises(ModuleError) as caught:
            ddp(inputs(rank), 1).backward()
        return caught.value.parameters

    assert run_ranks(2, rank_main) == [("heads.0.weight",)] * 2


def test_gradients_replaced_after_no_sync_are_reduced_as_they_are_2_ranks() -> None:
    def rank_main(rank: int) -> list[float | None]:
        ddp = dist.DistributedDataParallel(Tasks())
        with ddp.no_sync():
            ddp(inputs(rank), 0).backward()
        ddp.module.heads[0].weight.grad = torch.full((1, 1), 10.0 * (rank + 1))
        ddp(inputs(rank), 1).backward()
        return gradients(ddp)

    assert run_ranks(2, rank_main) == [[3.0, 15.0, 1.5]] * 2


@pytest.mark.parametrize("steps", [1, 2])
def test_parameter_left_out_of_a_static_graph_and_used_under_no_sync_is_named_2_ranks(
    steps: int,
) -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ddp = dist.DistributedDataParallel(Tasks(), static_graph=True)
        for _ in range(steps):
            ddp(inputs(rank), 1).backward()
        with ddp.no_sync():
            ddp(inputs(rank), 0).backward()
        with pytest.raises(ModuleError) as caught:
            ddp(inputs(rank), 1).backward()
        return caught.value.parameters

    assert run_ranks(2, rank_main) == [("heads.0.weight",)] * 2


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_graphs_of_different_parameters_in_any_order_of_backwards_2_ranks(order: list[int]) -> None:
    def rank_main(rank: int) -> list[float | None]:
        ddp = dist.DistributedDataParallel(Tasks(), find_unused_parameters=True)
        ddp(inputs(rank), 1).backward()
        ddp.zero_grad()
        losses = [ddp(inputs(rank), task) for task in range(2)]
        for task in order:
            losses[task].backward()
        return gradients(ddp)

    assert run_ranks(2, rank_main) == [[3.0, 1.5, 1.5]] * 2


def test_forward_without_gradients_before_the_backward_2_ranks() -> None:
    def rank_main(rank: int) -> list[float | None]:
        ddp = dist.DistributedDataParallel(Tasks(), find_unused_parameters=True)
        ddp(inputs(rank), 1).backward()
        ddp.zero_grad()
        loss = ddp(inputs(rank), 0)
        with torch.no_grad():
            ddp(inputs(rank), 1)
        loss.backward()
        return gradients(ddp)

    assert run_ranks(2, rank_main) == [[1.5, 1.5, None]] * 2


@pytest.mark.parametrize("backward", [False, True])
def test_buckets_go_with_the_module_and_not_with_the_garbage_collector_1_rank(
    backward: bool,
) -> None:
    def rank_main(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(Tasks())
        loss = ddp(inputs(rank), 0) + ddp(inputs(rank), 1)
        if backward:
            loss.backward()
        reducer = weakref.ref(ddp.reducer)
        del ddp, loss
        return reducer()

    gc.collect()
    gc.disable()
    try:
        assert run_ranks(1, rank_main) == [None]
    finally:
        gc.enable()


def test_old_gradients_of_parameters_that_are_left_out_stay_as_they_are_2_ranks() -> None:
    def rank_main(rank: int) -> list[float | None]:
        ddp = dist.DistributedDataParallel(Tasks(), static_graph=True)
        for parameter in ddp.parameters():
            parameter.grad = torch.full((1, 1), 7.0)
        for _ in range(3):
            ddp(inputs(rank), 0).backward()
            for p in (ddp.module.body.weight, ddp.module.heads[0].weight):
                p.grad = None
        ddp(inputs(rank), 0).backward()
        return gradients(ddp)

    assert run_ranks(2, rank_main) == [[1.5, 1.5, 7.0]] * 2


def test_backward_averages_though_nobody_holds_the_wrapper_2_ranks() -> None:
    def rank_main(rank: int) -> float:
        module = nn.Linear(1, 1, bias=False)
        dist.DistributedDataParallel(module)(torch.full((1, 1), float(rank))).sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad.item()

    assert run_ranks(2, rank_main) == [0.5, 0.5]
