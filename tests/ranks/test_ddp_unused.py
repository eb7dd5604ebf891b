"""DDP with parameters that a backward does not reach, on one rank or on all; or that are frozen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks
from ranks.ddp_models import Branches


def test_gradient_missing_on_one_rank_is_named_on_all_and_nobody_hangs() -> None:
    def rank_main(rank: int) -> ModuleError:
        ddp = dist.DistributedDataParallel(Branches(), bucket_cap_mb=1e-6)
        names = ("left",) if rank == 1 else ("left", "right")
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 2), *names).backward()
        # The ranks are still together, and the next step is good.
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


def test_unused_parameters_are_averaged_where_used_and_left_alone_elsewhere() -> None:
    def rank_main(rank: int) -> list[Any]:
        ddp = dist.DistributedDataParallel(Branches(), find_unused_parameters=True)
        for p in ddp.parameters():
            p.data.fill_(1)
        x = torch.ones(1, 2)
        ddp(x, "left" if rank == 0 else "right").backward()
        both = [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]
        ddp.zero_grad()
        ddp(x, "left").backward()
        one = ddp.module.right.weight.grad
        ddp(x * 3, "right").backward()  # left keeps its gradient, bit by bit
        kept = [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]
        return [both, one, kept]

    half, one, three = [[[v, v]] * 2 for v in (0.5, 1.0, 3.0)]
    for both, unused, kept in run_ranks(2, rank_main):
        assert both == [half, half]
        assert unused is None
        assert kept == [one, three]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_gradient_of_a_parameter_nobody_used_is_kept_bit_by_bit_7_ranks() -> None:
    # The mean of seven equal numbers is not always that number, so averaging again would show.
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(1))

        def forward(self, both: bool) -> torch.Tensor:
            return (self.a * values).sum() + self.b.sum() if both else self.b.sum()

    def rank_main(rank: int) -> bool:
        ddp = dist.DistributedDataParallel(Two(), find_unused_parameters=True)
        ddp(True).backward()
        before = ddp.module.a.grad.clone()
        ddp(False).backward()
        again = before.clone()
        dist.all_reduce(again, dist.ReduceOp.AVG)
        assert not torch.equal(again, before)
        return torch.equal(before, ddp.module.a.grad)

    assert run_ranks(7, rank_main) == [True] * 7


def test_parameters_used_under_no_sync_only_are_reduced_2_ranks() -> None:
    def rank_main(rank: int) -> list[list[list[float]]]:
        ddp = dist.DistributedDataParallel(Branches())
        x = torch.full((1, 2), rank + 1.0)
        with ddp.no_sync():
            ddp(x, "left").backward()
        ddp(x, "right").backward()
        return [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]

    for grads in run_ranks(2, rank_main):
        assert grads == [[[1.5, 1.5]] * 2] * 2


def test_parameter_frozen_after_wrapping_is_not_missed_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[float, Any]:
        ddp = dist.DistributedDataParallel(Branches())
        ddp.module.right.weight.requires_grad_(False)
        ddp(torch.full((1, 2), rank + 1.0), "left", "right").backward()
        return ddp.module.left.weight.grad[0, 0].item(), ddp.module.right.weight.grad

    assert run_ranks(2, rank_main) == [(1.5, None)] * 2


def test_parameter_unfrozen_after_wrapping_is_named_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        module = Branches()
        module.right.requires_grad_(False)
        ddp = dist.DistributedDataParallel(module)
        ddp(torch.ones(1, 2), "left").backward()
        module.right.requires_grad_(True)
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 2), "left")
        dist.DistributedDataParallel(ddp.module)(torch.ones(1, 2), "left", "right").backward()
        return caught.value.parameters

    assert run_ranks(2, rank_main) == [("right.weight",)] * 2


def test_needless_search_for_unused_parameters_is_said_once_1_rank() -> None:
    def rank_main(rank: int) -> int:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                ddp(torch.ones(1, 1)).sum().backward()
        return len(caught)

    assert run_ranks(1, rank_main) == [1]


def test_parameters_that_are_never_used_are_left_out_when_asked_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[int, Any]:
        ddp = dist.DistributedDataParallel(
            Branches(),
            bucket_cap_mb=1e-6,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
        for _ in range(2):
            ddp(torch.ones(1, 2), "left").backward()
        data = ddp._get_ddp_logging_data()  # pyright: ignore[reportPrivateUsage]
        return len(list(ddp.reducer.views())), data["num_buckets_reduced"]

    assert run_ranks(2, rank_main) == [(1, 1)] * 2
