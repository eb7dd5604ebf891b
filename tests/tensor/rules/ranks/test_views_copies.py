"""Views of sharded tensors: those that share memory with their source, and those that cannot."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from dure.errors import PlacementError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh, spec
from tests.thread_ranks import on_mesh, on_ranks


def refused():
    return pytest.raises(PlacementError, match="a view that is a copy")


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
def test_a_view_is_no_copy_where_the_table_of_specs_was_emptied(rank):
    whole, x = sharded()
    spec._specs.clear()  # as it is when it is full
    x.detach().add_(10)
    assert torch.equal(x.full_tensor(), whole + 10)


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


@pytest.mark.parametrize(
    "view",
    [
        lambda row: row.view(2),
        lambda row: row[0],
        lambda row: row.detach(),
        lambda row: row.unsqueeze(0).t(),
        lambda row: row.split(1)[1],
    ],
)
@on_ranks(2)
def test_a_view_of_a_copy_is_a_copy(rank, view):
    whole, x = sharded()
    for _ in range(2):  # as the rules say, and as it is known
        seen = view(x[1])
        assert torch.equal(seen.full_tensor(), view(whole[1]))
        with refused():
            seen.add_(1)
        x.add_(1)
        whole = whole + 1
        with refused():
            _ = seen + 1
    with refused():
        x[1].data.add_(1)
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(2)
def test_lists_and_what_is_no_operator_meet_copies(rank):
    whole, x = sharded()
    row = x[1]
    with refused():
        torch._foreach_add_([row], 1.0)
    with refused():
        x.data = row
    assert torch.equal(torch._foreach_add([row], 1.0)[0].full_tensor(), whole[1] + 1)
    assert torch.equal(copy.deepcopy(row).full_tensor(), whole[1])
    torch._foreach_add_([x], 1.0)
    reads = (
        lambda: torch._foreach_add([row], 1.0),
        lambda: torch._foreach_norm([row]),
        lambda: copy.deepcopy(row),
        lambda: pickle.dumps(row),
        lambda: str(row),
    )
    for read in reads:
        with refused():
            read()


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


@on_ranks(2)
def test_what_has_no_rule_in_place_is_written_by_its_twin(rank):
    whole, x = sharded(5)
    index = DTensor.from_local(torch.tensor([4, 0]), x.device_mesh)
    before = x.to_local().data_ptr()
    x.index_fill_(0, index, 7.0)
    whole.index_fill_(0, torch.tensor([4, 0]), 7.0)
    assert x.placements == (Shard(0),) and x.to_local().data_ptr() == before
    assert torch.equal(x.full_tensor(), whole)
    terms = DTensor.from_local(torch.ones(3), x.device_mesh, [Partial()])
    with pytest.raises(PlacementError):
        terms.index_fill_(0, index, 7.0)
