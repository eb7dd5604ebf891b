"""Clipping by the norm of gradients of which each rank owns some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import UsageError
from dure.testing import CommRecorder, run_ranks


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_of_parts_is_the_norm_of_the_whole_3_ranks(norm_type: float) -> None:
    whole = nn.Parameter(torch.zeros(6))
    whole.grad = torch.tensor([3.0, -4.0, 0.0, 12.0, 1.0, -2.0])

    def rank_main(rank: int) -> list[Any]:
        part = nn.Parameter(torch.zeros(3))
        owned = [] if rank == 2 else [part]
        part.grad = torch.tensor([[3.0, -4.0, 0.0], [12.0, 1.0, -2.0], [9.0, 9.0, 9.0]][rank])
        with CommRecorder() as seen:
            norm = dist.clip_grad_norm_(owned, 2.0, norm_type)
        return [float(norm), part.grad.tolist(), seen.ops]

    norm = nn.utils.clip_grad_norm_([whole], 2.0, norm_type)
    results = run_ranks(3, rank_main)
    assert [r[0] for r in results] == pytest.approx([float(norm)] * 3)
    assert results[0][1] + results[1][1] == pytest.approx(whole.grad.tolist())
    assert [r[2] for r in results] == [["all_reduce"]] * 3


def test_norm_that_is_not_finite_can_be_refused_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        part = nn.Parameter(torch.zeros(1))
        part.grad = torch.full([1], float("inf") if rank else 1.0)
        with pytest.raises(UsageError):
            dist.clip_grad_norm_(part, 1.0, error_if_nonfinite=True)
        with pytest.raises(UsageError):
            dist.clip_grad_norm_(part, 1.0, norm_type=0.0)

    run_ranks(2, rank_main)
