"""One norm over gradients of several meshes and plain ones."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.errors import UsageError
from dure.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
)
from dure.testing import CommRecorder
from tests.thread_ranks import on_mesh, on_ranks


@pytest.mark.parametrize(("p", "largest"), [(2.0, 2.0), (1.0, 2.0), (math.inf, 2.0), (2.0, 999.0)])
@on_ranks(4)
def test_one_norm_over_several_meshes(rank: int, p: float, largest: float) -> None:
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
        norm = clip_grad_norm_([*ours, *ours, terms, nn.Parameter(torch.ones(1))], largest, p)
    assert seen.ops == ["all_gather_single", "all_gather_single"]  # one per mesh
    expected = torch.nn.utils.clip_grad_norm_(theirs, largest, p)
    torch.testing.assert_close(norm, expected)
    for own, other in zip([*ours, terms], theirs, strict=True):
        seen_grad = own.grad.full_tensor() if isinstance(own, DTensor) else own.grad
        torch.testing.assert_close(seen_grad, other.grad)


@on_ranks(2)
def test_torchs_functions_exchange_the_norms_of_a_mesh_at_once(rank: int) -> None:
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    weights = [
        nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0), Replicate()][: mesh.ndim]))
        for mesh in (line, line, line, grid)
    ]
    wholes = [torch.tensor(w) for w in ([1.0, 1.0], [1.0, 2.0], [3.0, 0.0], [3.0, 0.0])]
    with_gradients(weights, wholes)
    for some, norm, count in ((weights[:3], 4.0, 1), (weights, 5.0, 2)):
        with CommRecorder() as seen:
            grads: Any = [w.grad for w in some]
            total = nn.utils.get_total_norm(grads)
        assert seen.ops == ["all_gather_single"] * count  # one per mesh
        assert total.item() == norm
    with CommRecorder() as seen:
        clipped: Any = nn.utils.clip_grad_norm_(weights[:3], 2.0)
    assert seen.ops == ["all_gather_single"]
    assert clipped.full_tensor().item() == 4.0
    torch.testing.assert_close(weights[1].grad.full_tensor(), torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize(("p", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
@on_ranks(2)
def test_one_norm_over_stages_that_have_other_parameters(rank: int, p: float, norm: float) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0 + rank, 0.0])
    seen = clip_grad_norm_(weight, 1.0, p, process_group=mesh.get_group("pp"))
    torch.testing.assert_close(seen, torch.tensor(norm))
    torch.testing.assert_close(weight.grad[0], torch.tensor((3.0 + rank) / norm))


@on_mesh(2)
def test_a_norm_that_is_not_finite_is_told_where_that_is_asked_for(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.tensor([1.0, math.nan]), mesh, [Shard(0)])
    with pytest.raises(UsageError):
        clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    with pytest.raises(UsageError):
        clip_grad_norm_(weight, 1.0, norm_type=0.0)


# ---- which ranks have a gradient -----------------------------------------------------------------


def with_gradients(parameters: list[Any], wholes: list[torch.Tensor]) -> list[Any]:
    for own, whole in zip(parameters, wholes, strict=True):
        own.grad = whole.clone()
        if isinstance(own, DTensor):
            own.grad = distribute_tensor(whole, own.device_mesh, own.placements)
    return parameters


@on_ranks(4)
def test_a_dtensor_is_counted_once_among_the_ranks_of_its_mesh(rank: int) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    own = nn.Parameter(distribute_tensor(torch.zeros(2), grid["shard"], [Shard(0)]))
    with_gradients([own], [torch.tensor([3.0, 4.0]) if rank < 2 else torch.tensor([0.0, 12.0])])
    for group in (grid.get_group("stage"), dure.group.WORLD):
        norm = clip_grad_norm_(own, 99.0, process_group=group)
        torch.testing.assert_close(norm, torch.tensor(13.0))


@on_mesh(4)
def test_meshes_without_this_rank_need_a_group(line: DeviceMesh) -> None:
    halves = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    wholes = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    ours = [distribute_tensor(torch.zeros(2), m, [Shard(0)]).requires_grad_() for m in halves]
    with_gradients(ours, wholes)
    with pytest.raises(UsageError):
        clip_grad_norm_(ours, 1.0)
    norm = clip_grad_norm_(ours, 1.0, process_group=line.get_group())
    torch.testing.assert_close(norm, torch.tensor(5.0))


@on_mesh(2)
def test_a_norm_whose_square_overflows_is_clipped(mesh: DeviceMesh) -> None:
    for kind, size in ((torch.float32, 2.0**100), (torch.float16, 2.0**15)):
        whole = torch.full((4,), size, dtype=kind)
        own = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=kind), mesh, [Shard(0)]))
        plain = nn.Parameter(torch.zeros(4, dtype=kind))
        with_gradients([own, plain], [whole, whole])
        norm = clip_grad_norm_([own, plain], 8.0, error_if_nonfinite=True)
        torch.testing.assert_close(norm, torch.tensor(size * 8**0.5))
        for grad in (own.grad.full_tensor(), plain.grad):
            torch.testing.assert_close(grad, torch.full((4,), 8**0.5, dtype=kind))
