"""Redistribution: the order of cuts, plans, memory, dtypes.

All pairs of placements on many meshes are gone through by `dtensor_worlds.redistributes`.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math

import pytest
import torch

from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.tensor.placement_types import StridedShard
from dure.tensor.redistribute import Move, plan_of
from dure.tensor.spec import TensorMeta, spec_of
from dure.testing import CommRecorder, run_ranks
from tests.tensor.ranks import dtensor_worlds as worlds
from tests.tensor.ranks.parts import made, part_of
from tests.thread_ranks import on_mesh, on_ranks

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")
INNER = StridedShard(0, split_factor=2)  # cuts after a later axis of 2


@pytest.mark.parametrize("rows", [12, 9, 7, 3, 1])
@on_mesh(3, 2)
def test_a_later_axis_may_cut_first(mesh, rows):
    """As FSDP over tensor parallelism: the later axis cuts the rows, the first what it left."""

    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    x = made(mesh, whole, [INNER, S0])
    assert torch.equal(x.full_tensor(), whole)
    for new in [[S0, S0], [R, S0], [S0, R], [S1, S0], [INNER, S0], [R, S1]]:
        got = x.redistribute(placements=new)
        expected = part_of(whole, new, (3, 2), mesh.get_coordinate())
        assert torch.equal(got.to_local(), expected), new
        back = got.redistribute(placements=[INNER, S0])
        assert torch.equal(back.to_local(), x.to_local())
    assert plan_of(x.spec, x.spec.with_placements([R, S0])).steps[0].move is Move.ALL_GATHER
    assert len(plan_of(x.spec, x.spec.with_placements([R, S0])).steps) == 1


@on_ranks(2)
def test_runs_are_cut_each(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0)
    x = DTensor.from_local(whole, mesh).redistribute(placements=[StridedShard(0, split_factor=3)])
    assert x.to_local().tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]][rank]
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(x.redistribute(placements=[S0]).full_tensor(), whole)


def test_the_cheapest_plan_is_taken():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meta = TensorMeta(torch.Size([64, 64]), (64, 1), torch.float32)

        def moves(old, new):
            plan = plan_of(spec_of(mesh, tuple(old), meta), spec_of(mesh, tuple(new), meta))
            return [(step.move.value, step.axis) for step in plan.steps]

        return [
            moves([S0, R], [S0, S1]),
            moves([SUM, R], [S0, R]),
            moves([SUM, R], [R, S0]),
            moves([S0, R], [S1, R]),
            moves([S0, S0], [S0, R]),
            moves([R, R], [R, R]),
        ]

    assert run_ranks(4, body)[0] == [
        [("slice", 1)],
        [("reduce_scatter", 0)],
        [("slice", 1), ("all_reduce", 0)],  # the half that is kept is reduced
        [("all_to_all", 0)],
        [("all_gather", 1)],
        [],
    ]


@on_mesh(2)
def test_results_may_be_under_way(mesh):
    whole = torch.arange(8.0)
    y = made(mesh, whole, [S0]).redistribute(placements=[R], async_op=True)
    assert torch.equal((y + y).to_local(), 2 * whole)


@on_mesh(2)
def test_values_and_gradients_may_move_in_other_dtypes(mesh):
    whole = torch.tensor([1.0, 1.0 + 2**-12, 3.0, 257.0])  # bfloat16 has 8 bits of them
    x = made(mesh, whole, [S0]).requires_grad_()
    y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16)
    assert y.dtype == y.to_local(grad_placements=[R]).dtype == torch.bfloat16
    assert y.to_local(grad_placements=[R]).tolist() == [1.0, 1.0, 3.0, 256.0]
    (grad,) = torch.autograd.grad(y, x, made(mesh, torch.full((4,), 3.0).bfloat16(), [R]))
    assert grad.dtype == torch.float32
    assert grad.full_tensor().tolist() == [3.0] * 4
    z = x.redistribute(placements=[R], backward_dtype=torch.bfloat16)
    assert torch.equal(z.to_local(grad_placements=[R]), whole)
    (grad,) = torch.autograd.grad(z, x, made(mesh, whole, [R]))
    assert grad.dtype == torch.float32
    assert grad.full_tensor().tolist() == [1.0, 1.0, 3.0, 256.0]


@on_ranks(2)
def test_redistribute_gives_memory_of_its_own(rank):
    whole = torch.arange(8.0).reshape(4, 2)
    x = DTensor.from_local(whole, init_device_mesh("cpu", (2,))).redistribute(placements=[S0])
    before = whole.clone()
    x.add_(1)
    assert torch.equal(whole, before)


@on_mesh(2)
def test_tensors_without_values_are_reduced_without_a_message(mesh):
    x = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [S0])
    with CommRecorder() as seen:
        assert torch.linalg.vector_norm(x).to_local().shape == ()
        assert torch.softmax(x, 0).to_local().shape == (2, 3)
    assert seen.ops == []


# --------------------------------------------------------------------------------------------------
# Redistribution on meshes of 1, 2 and 3 axes over worlds of 1 to 8 thread-ranks.


@pytest.mark.parametrize("sizes", worlds.MESHES, ids=str)
def test_pairs_of_placements(sizes: tuple[int, ...]) -> None:
    most = 200 if math.prod(sizes) <= 4 else 100
    run_ranks(math.prod(sizes), worlds.redistributes, sizes, most)


@pytest.mark.parametrize("sizes", [(3,), (4,), (3, 2)], ids=str)
def test_pairs_of_placements_where_uneven_parts_are_padded(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """As along axes of more ranks."""
    monkeypatch.setattr("dure.tensor.redistribute._MOST_PARTS", 1)
    run_ranks(math.prod(sizes), worlds.redistributes, sizes, 200)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3, 2)], ids=str)
def test_all_placements_on_three_axes(sizes: tuple[int, ...]) -> None:
    run_ranks(math.prod(sizes), worlds.redistributes, sizes, 10_000)
