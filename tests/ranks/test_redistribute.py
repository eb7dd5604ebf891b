"""Redistribution: which elements each rank has, and every way between lists of placements.

Which rank has what is computed here by masks over the whole tensor, cut by cut; the code under test
computes with sizes and offsets.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dure.errors import MeshError, PlacementError, ShapeError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.tensor.placement_types import StridedShard
from dure.tensor.redistribute import Move, plan_of
from dure.tensor.spec import TensorMeta, spec_of
from dure.testing import run_ranks

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")
INNER = StridedShard(0, split_factor=2)  # cuts after a later axis of 2


def part_of(whole, placements, sizes, coordinate, first=()):
    """This rank's part, by torch.chunk, axis by axis; those named in `first` before the others."""
    order = [*first, *(axis for axis in range(len(sizes)) if axis not in first)]
    part = whole
    for axis in order:
        placement, n, index = placements[axis], sizes[axis], coordinate[axis]
        if placement.is_shard():
            dim = placement.dim
            chunks = list(part.chunk(n, dim))
            empty = part.narrow(dim, 0, 0)
            part = chunks[index] if index < len(chunks) else empty
        elif placement.is_partial("sum"):
            part = part * n if index == 0 else -part
        elif placement.is_partial("avg"):
            part = part * n if index == 0 else part * 0
        elif placement.is_partial("max"):
            part = part if index == n - 1 else part - 5
        elif placement.is_partial("min"):
            part = part if index == n - 1 else part + 5
        elif placement.is_partial("product"):
            part = part if index == 0 else torch.ones_like(part)
    return part.contiguous()


def made(mesh, whole, placements, first=()):
    part = part_of(whole, placements, mesh.shape, mesh.get_coordinate(), first)
    return DTensor.from_local(part, mesh, placements, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_way_along_one_axis(n):
    def body(rank):
        mesh = init_device_mesh("cpu", (n,))
        for shape in [(4, 6), (5, 3), (1, 7), (0, 2), (12,)]:
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) * 4
            ways = [R, S0, *([S1] if len(shape) > 1 else [])]
            terms = [Partial(op) for op in ("sum", "avg", "min", "max", "product")]
            for old, new in itertools.product([*ways, *terms], ways):
                x = made(mesh, whole, [old])
                got = x.redistribute(placements=[new])
                assert torch.equal(got.to_local(), part_of(whole, [new], (n,), (rank,))), (old, new)
                assert got.shape == whole.shape
                assert torch.equal(x.full_tensor(), whole)

    run_ranks(n, body)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 1, 2)])
def test_every_way_along_several_axes(sizes):
    def body(rank):
        mesh = init_device_mesh("cpu", sizes)
        coordinate = mesh.get_coordinate()
        ways = list(itertools.product([R, S0, S1], repeat=len(sizes)))
        olds = [*ways, *itertools.product([R, S0, S1, SUM], repeat=len(sizes))]
        pairs = list(itertools.product(olds, ways))
        pairs = random.Random(0).sample(pairs, min(len(pairs), 250))
        for shape in [(6, 4), (5, 7)]:
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            for old, new in pairs:
                x = made(mesh, whole, old)
                got = x.redistribute(placements=new).to_local()
                assert torch.equal(got, part_of(whole, new, sizes, coordinate)), (old, new)

    run_ranks(torch.Size(sizes).numel(), body)


@pytest.mark.parametrize("rows", [12, 9, 7, 3, 1])
def test_a_later_axis_may_cut_first(rows):
    """As FSDP over tensor parallelism: the later axis cuts the rows, the first what it left."""

    def body(rank):
        mesh = init_device_mesh("cpu", (3, 2))
        whole = torch.arange(float(rows * 2)).reshape(rows, 2)
        x = made(mesh, whole, [INNER, S0], first=[1])
        assert torch.equal(x.full_tensor(), whole)
        for new in [[S0, S0], [R, S0], [S0, R], [S1, S0], [INNER, S0], [R, S1]]:
            first = [1] if new[0] is INNER else []
            got = x.redistribute(placements=new)
            expected = part_of(whole, new, (3, 2), mesh.get_coordinate(), first)
            assert torch.equal(got.to_local(), expected), new
            back = got.redistribute(placements=[INNER, S0])
            assert torch.equal(back.to_local(), x.to_local())
        assert plan_of(x.spec, x.spec.with_placements([R, S0])).steps[0].move is Move.ALL_GATHER
        assert len(plan_of(x.spec, x.spec.with_placements([R, S0])).steps) == 1

    run_ranks(6, body)


def test_runs_are_cut_each():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(12.0)
        x = DTensor.from_local(whole, mesh).redistribute(
            placements=[StridedShard(0, split_factor=3)]
        )
        assert x.to_local().tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]][rank]
        assert torch.equal(x.full_tensor(), whole)
        assert torch.equal(x.redistribute(placements=[S0]).full_tensor(), whole)

    run_ranks(2, body)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_was_moved_shares_no_memory_with_what_it_was(transposed):
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 1))
        whole = torch.arange(16.0).reshape(4, 4)
        whole = whole.t() if transposed else whole
        x = DTensor.from_local(whole, mesh)
        for new in [[S0, R], [S1, R], [R, S0], [S0, S1]]:
            expected = part_of(whole, new, (2, 1), (rank, 0)).clone()
            got = x.redistribute(placements=new)
            whole += 1
            assert torch.equal(got.to_local(), expected), new
            whole -= 1
        rows = x.redistribute(placements=[S0, R])
        same = rows.redistribute(placements=[StridedShard(0, split_factor=1), R])  # lies as it did
        assert same.to_local().data_ptr() == rows.to_local().data_ptr()

    run_ranks(2, body)


def test_gradients_move_back():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(6.0).reshape(3, 2)
        for old, new in itertools.product([R, S0, S1], [R, S0, S1]):
            x = made(mesh, whole, [old]).requires_grad_()
            y = x.redistribute(placements=[new])
            weight = made(mesh, whole + 1, [new])
            (grad,) = torch.autograd.grad(y, x, weight)
            assert torch.equal(grad.full_tensor(), whole + 1), (old, new)
        terms = torch.ones(3, 2, requires_grad=True)
        x = DTensor.from_local(terms, mesh, [SUM])
        x.redistribute(placements=[R]).to_local(grad_placements=[R]).sum().backward()
        assert torch.equal(terms.grad, torch.ones(3, 2))

    run_ranks(2, body)


def test_the_cheapest_plan_is_taken():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meta = TensorMeta(torch.Size([64, 64]), (64, 1), torch.float32)

        def moves(old, new):
            plan = plan_of(spec_of(mesh, tuple(old), meta), spec_of(mesh, tuple(new), meta))
            assert str(plan)
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


def test_results_may_be_under_way():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(8.0)
        y = made(mesh, whole, [S0]).redistribute(placements=[R], async_op=True)
        assert torch.equal((y + y).to_local(), 2 * whole)

    run_ranks(2, body)


def test_values_and_gradients_may_move_in_other_dtypes():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
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

    run_ranks(2, body)


def test_what_does_not_fit_is_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(2, 2), mesh, [S0])
        for placements in ([Partial()], [R, R], [Shard(2)], [Shard(-3)], [], R, ["S(0)"]):
            with pytest.raises(PlacementError):
                x.redistribute(placements=placements)
        with pytest.raises(PlacementError):
            x.redistribute()
        with pytest.raises(MeshError):
            x.redistribute(init_device_mesh("cpu", (1, 2)), [R, R])
        with pytest.raises(PlacementError):
            Partial("mean")
        with pytest.raises(PlacementError):
            Shard("0")
        with pytest.raises(ShapeError):
            DTensor.from_local(torch.ones(2), mesh, [S0], shape=torch.Size([8]), stride=(1,))
        with pytest.raises(ShapeError):
            DTensor.from_local(torch.ones(2), mesh, [S0], shape=torch.Size([4]))
        with pytest.raises(MeshError):
            DTensor.from_local(torch.ones(2))

    run_ranks(2, body)


def test_reductions_that_do_not_commute_are_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 1))
        assert DTensor.from_local(torch.ones(2), mesh, [SUM, Partial("avg")]).full_tensor()[0] == 2
        with pytest.raises(PlacementError, match="commute"):
            DTensor.from_local(torch.ones(2), mesh, [SUM, Partial("max")])

    run_ranks(2, body)
