"""One norm over gradients of several meshes and plain ones."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
)
from dure.testing import CommRecorder, run_ranks


@pytest.mark.parametrize(("p", "largest"), [(2.0, 2.0), (1.0, 2.0), (math.inf, 2.0), (2.0, 999.0)])
def test_one_norm_over_several_meshes(p: float, largest: float) -> None:
    def body(rank: int) -> None:
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        wholes = [torch.arange(1.0, 7.0) * k for k in (1, 2, 3, 4)]
        ours: list[Any] = [
            nn.Parameter(distribute_tensor(torch.zeros(6), line, [Shard(0)])),
            nn.Parameter(distribute_tensor(torch.zeros(6), line, [Shard(0)])),
            nn.Parameter(distribute_tensor(torch.zeros(6), grid, [Replicate(), Shard(0)])),
            nn.Parameter(torch.zeros(6)),
        ]
        theirs = [nn.Parameter(torch.zeros(6)) for _ in wholes]
        for own, other, whole in zip(ours, theirs, wholes, strict=True):
            other.grad, own.grad = whole.clone(), whole.clone()
            if isinstance(own, DTensor):
                own.grad = distribute_tensor(whole, own.device_mesh, own.placements)
        terms = nn.Parameter(distribute_tensor(torch.zeros(6), line))
        terms.grad = DTensor.from_local(torch.ones(6), line, [Partial()])
        theirs.append(nn.Parameter(torch.zeros(6)))
        theirs[-1].grad = torch.full((6,), 4.0)
        assert terms.grad is not None  # reading it reduces the terms
        with CommRecorder() as seen:
            norm = clip_grad_norm_([*ours, terms, nn.Parameter(torch.ones(1))], largest, p)
        assert seen.ops == ["all_reduce", "all_reduce"]  # one a mesh
        expected = torch.nn.utils.clip_grad_norm_(theirs, largest, p)
        torch.testing.assert_close(norm, expected)
        for own, other in zip([*ours, terms], theirs, strict=True):
            seen_grad = own.grad.full_tensor() if isinstance(own, DTensor) else own.grad
            torch.testing.assert_close(seen_grad, other.grad)

    run_ranks(4, body)


@pytest.mark.parametrize(("p", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
def test_one_norm_over_stages_that_have_other_parameters(p: float, norm: float) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([3.0 + rank, 0.0])
        seen = clip_grad_norm_(weight, 1.0, p, process_group=mesh.get_group("pp"))
        torch.testing.assert_close(seen, torch.tensor(norm))
        torch.testing.assert_close(weight.grad[0], torch.tensor((3.0 + rank) / norm))

    run_ranks(2, body)


def test_a_norm_that_is_not_finite_is_told_where_that_is_asked_for() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.tensor([1.0, math.nan]), mesh, [Shard(0)])
        with pytest.raises(UsageError):
            clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)

    run_ranks(2, body)
