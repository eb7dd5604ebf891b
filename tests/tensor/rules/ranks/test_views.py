"""Views of sharded tensors: which shards stay, which views are copies, parts in every order."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch

from dure.errors import PlacementError
from dure.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.extension import use_native
from dure.testing import CommRecorder
from tests.tensor.ranks.operators import Sample, failures, ways
from tests.tensor.ranks.parts import ORDERS, made
from tests.thread_ranks import on_mesh, on_ranks


def reshaped(*shapes):
    def run(x):
        for shape in shapes:
            x = x.reshape(shape)
        return x * 2

    return run


def linear(x, weight):
    """As torch computes it: rows flattened, a product, rows unflattened."""
    return (x.flatten(0, 1) @ weight).unflatten(0, x.shape[:2])


def heads(x):
    split = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    return split.reshape(x.shape[0] * 4, x.shape[1], -1) * 2


RESHAPES = [
    ((4, 6), [(24,), (8, 3)]),
    ((24,), [(4, 6), (24,)]),
    ((24,), [(2, 2, 6), (4, 6)]),
    ((2, 4, 6), [(48,), (8, 6)]),
    ((4, 4, 3), [(16, 3), (2, 8, 3)]),
    ((8, 8), [(64,), (4, 16)]),
    ((3, 5), [(15,), (5, 3)]),
    ((0, 4), [(4, 0)]),
    ((1, 4), [(4,), (1, 4, 1)]),
    ((12,), [(6, 2), (3, 2, 2), (12,)]),
    ((2, 6, 2), [(12, 2), (24,)]),
    ((36,), [(6, 6), (36,), (4, 9)]),
]


@on_ranks(2)
def test_a_view_beside_a_sharded_dimension_of_size_1_sends_nothing(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0).reshape(1, 2, 3), mesh, [Shard(0)])
    with CommRecorder() as seen:
        made = [x.view(1, 6), x.view(1, 1, 6), x.reshape(1, 3, 2)]
    assert seen.ops == []
    assert [y.placements for y in made] == [(Shard(0),)] * 3
    assert [y.to_local().shape for y in made] == [(1 - rank, *y.shape[1:]) for y in made]
    assert all(y.full_tensor().flatten().tolist() == [0, 1, 2, 3, 4, 5] for y in made)
    assert x.view(6).placements == (Replicate(),)  # torch refuses


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (2, 1, 2)], ids=str)
def test_reshapes_of_reshapes(sizes):
    """Cuts of several axes through dimensions that are flattened and split, in every order."""
    samples = [
        Sample(f"{shape} {to}", reshaped(*to), (torch.randn(shape, requires_grad=True),))
        for shape, to in RESHAPES
    ]
    for shape in [(4, 4, 6), (3, 4, 2), (2, 8, 3)]:
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[2], 4)
        samples.append(Sample(f"linear {shape}", linear, (x, weight)))
    for shape in [(2, 4, 8), (4, 3, 8)]:
        samples.append(Sample(f"heads {shape}", heads, (torch.randn(shape),)))
    tries = [(s.compute(), way) for s in samples for way in ways(s, sizes, 10)]
    assert failures(tries, sizes) == []


# --------------------------------------------------------------------------------------------------
# Views of sharded tensors: those that share memory with their source, and those that cannot.


def refused():
    return pytest.raises(PlacementError, match=r"because it is a copy|is an outdated copy")


def sharded(rows=4):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    made = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    return whole, made


@on_ranks(2)
def test_a_view_that_needs_no_move_shares_memory(rank):
    whole, x = sharded()
    x[:, 1].add_(10)
    whole[:, 1] += 10
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(2)
def test_a_view_that_is_a_copy_is_not_written(rank):
    whole, x = sharded()
    row = x[0]
    assert torch.equal(row.full_tensor(), whole[0])
    assert torch.equal(row.clone().add_(1).full_tensor(), whole[0] + 1)
    for write in (lambda: row.add_(1), row.zero_, lambda: torch.relu_(row)):
        with refused():
            write()
        torch.relu_(x[:, 0])  # the same operator, known by now
    with refused():
        x[0] = 1.0
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(2)
def test_a_view_that_is_a_copy_is_not_read_when_its_source_was_written(rank):
    whole, x = sharded()
    row = x[1]
    assert torch.equal((row + 1).full_tensor(), whole[1] + 1)
    x.add_(1)
    reads = (
        lambda: row + 1,
        lambda: torch.cat([row, row]),
        row.full_tensor,
        row.to_local,
        lambda: row.view(2),
    )
    for read in reads:
        with refused():
            read()
    assert torch.equal((x[1] + 1).full_tensor(), whole[1] + 2)


@on_ranks(2)
def test_what_a_list_operator_writes_is_known_to_autograd(rank):
    _, x = sharded()
    x.requires_grad_()
    loss = (x * x).sum()
    with torch.no_grad():
        torch._foreach_mul_([x], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (x * x).sum()
    with torch.no_grad():  # tensor by tensor, as their placements differ
        torch._foreach_mul_([x], [x.redistribute(placements=[Replicate()])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:aten.as_strided_copy")
@on_mesh(2)
def test_a_view_of_memory(mesh):
    """It is taken of parts only if they lie in memory as the whole does."""

    whole = torch.arange(12.0).reshape(4, 3)
    x = DTensor.from_local(whole.clone(), mesh)
    cut = x.redistribute(placements=[Shard(0)])
    expected = whole.as_strided((3,), (3,), 1)
    assert torch.equal(x.t().as_strided((3,), (3,), 1).full_tensor(), expected)
    assert torch.equal(cut.as_strided((3,), (3,), 1).full_tensor(), expected)
    assert torch.equal(torch.as_strided_copy(cut.t(), (3,), (3,), 1).full_tensor(), expected)
    x.as_strided((3,), (3,), 1).add_(1)
    assert torch.equal(x.full_tensor()[:3, 1], whole[:3, 1] + 1)
    with refused():
        cut.as_strided((3,), (3,), 1).add_(1)
    turned = x.t().redistribute(placements=[Shard(0)])
    assert torch.equal(turned.as_strided((3,), (3,), 1).full_tensor(), expected + 1)
    spread = whole.repeat(1, 2)[:, ::2]
    seen = DTensor.from_local(spread, mesh).as_strided((3,), (3,), 1)
    assert torch.equal(seen.full_tensor(), spread.as_strided((3,), (3,), 1))
    assert torch.equal(cut[1:].as_strided((3,), (3,), 1).full_tensor(), expected)
    for unknown in (cut.t(), cut[:, 1:]):
        with pytest.raises(PlacementError):
            unknown.as_strided((3,), (3,), 1)


@on_ranks(2)
def test_a_tensor_becomes_a_view_of_itself(rank):
    whole, x = sharded()
    x.transpose_(0, 1)
    assert x.shape == (2, 4) and x.placements == (Shard(1),)
    x.unsqueeze_(0).squeeze_(0)
    assert torch.equal((x * 2).full_tensor(), whole.t() * 2)
    assert torch.equal(x.t_().full_tensor(), whole)
    with pytest.raises(PlacementError):
        x.resize_(3)


# --------------------------------------------------------------------------------------------------
# Views of DTensors whose parts are stored in other orders than their specs say.


@pytest.fixture(params=[True, False], ids=["extension", "Python"])
def way(request: pytest.FixtureRequest):
    use_native(request.param)
    yield
    use_native(True)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@on_ranks(2)
def test_a_view_begins_where_that_of_the_full_tensor_does(rank, placement):
    x = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (2,)), [placement])
    views = {
        0: x, 1: x[:, 1:], 4: x[1:], 8: x[2], 2: x.t()[2:], 3: x.view(32)[3:],
        24: x.split(2)[3],
    }  # fmt: skip
    assert [view.storage_offset() for view in views.values()] == list(views)
    assert x[:, 1:].clone().storage_offset() == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("order", ORDERS)
@on_mesh(3)
def test_a_view_that_the_strides_of_a_part_do_not_allow_is_a_copy(mesh, order):
    full = torch.arange(24.0).reshape(3, 4, 2)
    for placement in (Shard(0), Shard(1), Replicate()):
        for _ in range(2):  # the rules are asked, then the plan is known
            x = made(mesh, full, [placement], order)
            flat = x.view(3, 4, 2, 1) if placement.is_shard(1) else x.view(12, 2)
            assert torch.equal(flat.full_tensor(), full.view(flat.shape))
            assert flat.stride() == full.view(flat.shape).stride()
            if order in ("columns", "last two swapped") and placement.is_replicate():
                with pytest.raises(PlacementError, match="because it is a copy"):
                    flat.mul_(2)
                assert torch.equal(x.full_tensor(), full)
                continue
            flat.mul_(2)
            assert torch.equal(x.full_tensor(), full * 2)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("order", ORDERS)
@on_mesh(2)
def test_other_dtypes_and_strided_views_of_parts_of_any_order(mesh, order):
    full = torch.arange(24.0).reshape(3, 4, 2)
    x = made(mesh, full, [Shard(1)], order)
    complex_numbers = torch.view_as_complex(x)
    assert torch.equal(complex_numbers.full_tensor(), torch.view_as_complex(full))
    same = made(mesh, full, [Replicate()], order)
    assert torch.equal(same.view(torch.int64).full_tensor(), full.view(torch.int64))
    assert same.as_strided((4, 3), (2, 8), 1).full_tensor()[3].tolist() == [7.0, 15.0, 23.0]
