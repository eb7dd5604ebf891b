"""Operators on lists of tensors, norms of many tensors, and scaling of gradients."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from dure.errors import NotInGroupError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.rules.foreach import norm_of_norms, norms_by_mesh, norms_of
from dure.testing import CommRecorder
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh, on_ranks

WEIGHT = torch.linspace(-1, 1, 24).reshape(6, 4)


def placed(full: torch.Tensor, mesh: Any, *placements: Placement) -> DTensor:
    return made(mesh, full, placements)


@on_mesh(4)
def test_lists_that_lie_differently_go_tensor_by_tensor(mesh: DeviceMesh) -> None:
    first = placed(WEIGHT, mesh, Shard(0))
    second = placed(WEIGHT, mesh, Shard(1))
    torch._foreach_add_([first], [second], alpha=2)
    assert first.placements == (Shard(0),)
    assert torch.equal(first.full_tensor(), WEIGHT * 3)
    terms = DTensor.from_local(WEIGHT.clone(), mesh, [Partial()])
    (root,) = torch._foreach_abs([terms])
    assert torch.equal(root.full_tensor(), (WEIGHT * 4).abs())
    torch._foreach_mul_([terms], 0.5)
    assert torch.equal(terms.full_tensor(), WEIGHT * 2)
    row = placed(torch.arange(4.0), mesh, Shard(0))
    (made,) = torch._foreach_mul([placed(WEIGHT, mesh, Shard(1))], [row])
    assert torch.equal(made.full_tensor(), WEIGHT * torch.arange(4.0))
    torch._foreach_add_([terms], 1.0)
    assert torch.equal(terms.full_tensor(), WEIGHT * 2 + 1)
    with pytest.raises(UsageError):
        torch._foreach_add_([first], [WEIGHT])
    with pytest.raises(PlacementError):
        torch._fused_sgd_(
            [first], [second], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.0, math.inf, -math.inf])
@on_ranks(4)
def test_norms_of_dtensors_and_plain_ones(rank: int, p: float) -> None:
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    wholes = [WEIGHT, WEIGHT * 2, WEIGHT * 3, WEIGHT * 4, WEIGHT * 5, torch.ones(2)]
    tensors = [
        placed(WEIGHT, line, Shard(0)),
        placed(WEIGHT * 2, grid, Replicate(), Shard(1)),
        WEIGHT * 3,
        placed(WEIGHT * 4, line, Replicate()),
        DTensor.from_local(WEIGHT * 5 / 4, grid, [Partial(), Partial()]),
        placed(torch.ones(2), line, Shard(0)),  # two ranks have nothing
    ]
    for norm, whole in zip(norms_of(tensors, p), wholes, strict=True):
        seen = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(seen, torch.linalg.vector_norm(whole, p))
    flat = torch.cat([whole.flatten() for whole in wholes])
    found = norms_by_mesh(tensors, p, in_total=True)
    total = norm_of_norms(torch.cat([norms.values for norms in found]), p)
    torch.testing.assert_close(total.float(), torch.linalg.vector_norm(flat, p))
    norms = torch._foreach_norm([tensors[0], tensors[3]], p)
    torch.testing.assert_close(norms[0].full_tensor(), torch.linalg.vector_norm(WEIGHT, p))


@pytest.mark.parametrize("full", [WEIGHT, torch.zeros(6, 4)], ids=["numbers", "zeros"])
@on_mesh(2)
def test_norms_of_many_tensors_are_exchanged_at_once_with_few_calls_for_each(
    mesh: DeviceMesh, full: torch.Tensor
) -> None:
    def calls(count: int) -> int:
        """Count the calls of Python and C functions for the norms of `count` tensors."""
        kinds = (torch.float32, torch.bfloat16)
        tensors: list[Any] = [placed(full.to(kinds[i % 2]), mesh, Shard(0)) for i in range(count)]
        seen: list[str] = []
        with CommRecorder() as recorder:
            sys.setprofile(lambda frame, event, arg: seen.append(event))
            norms = torch._foreach_norm(tensors)
            sys.setprofile(None)
        assert recorder.ops == ["all_gather_single"]
        assert [norm.dtype for norm in norms] == [tensor.dtype for tensor in tensors]
        return sum(event in ("call", "c_call") for event in seen)

    calls(1)  # makes what later ones use
    assert calls(200) - calls(100) < 100 * 10


@on_mesh(4)
def test_what_one_rank_finds_not_finite_all_ranks_have_found(mesh: DeviceMesh) -> None:
    bad = torch.ones(8)
    bad[7] = math.inf  # on the last rank
    for whole, expected in ((torch.ones(8), 0.0), (bad, 1.0)):
        grads = [placed(whole, mesh, Shard(0)), torch.ones(3)]
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), 0.5))
        assert found.item() == expected
        assert torch.equal(grads[0].full_tensor(), whole * 0.5)
        assert torch.equal(grads[1], torch.full((3,), 0.5))


@on_ranks(3)
def test_a_number_on_a_mesh_without_this_rank_is_refused(rank):
    mesh, half = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 1])
    weight = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    rate = distribute_tensor(torch.tensor(0.5), half, [Replicate()])
    if rank < 2:
        torch._foreach_mul_([weight], rate)
        assert weight.to_local().item() == 0.5
        return
    with pytest.raises(NotInGroupError, match="does not contain this rank"):
        torch._foreach_mul_([weight], rate)
