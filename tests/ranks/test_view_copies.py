"""Views of sharded tensors: those that share memory with their source, and those that cannot."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from dure.errors import PlacementError, UsageError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh, spec
from dure.testing import run_ranks


def sharded(rows=4):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    made = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    return whole, made


def test_a_view_that_needs_no_move_shares_memory():
    def body(rank):
        whole, x = sharded()
        x[:, 1].add_(10)
        whole[:, 1] += 10
        assert torch.equal(x.full_tensor(), whole)

    run_ranks(2, body)


def test_a_view_is_no_copy_where_the_table_of_specs_was_emptied():
    def body(rank):
        whole, x = sharded()
        spec._specs.clear()  # as it is when it is full
        x.detach().add_(10)
        assert torch.equal(x.full_tensor(), whole + 10)

    run_ranks(2, body)


def test_redistribute_gives_memory_of_its_own():
    def body(rank):
        whole, x = sharded()
        before = whole.clone()
        x.add_(1)
        assert torch.equal(whole, before)

    run_ranks(2, body)


def test_a_view_that_is_a_copy_is_not_written():
    def body(rank):
        whole, x = sharded()
        row = x[0]
        assert torch.equal(row.full_tensor(), whole[0])
        assert torch.equal(row.clone().add_(1).full_tensor(), whole[0] + 1)
        for write in (lambda: row.add_(1), row.zero_, lambda: torch.relu_(row)):
            with pytest.raises(PlacementError, match="a view that is a copy"):
                write()
            torch.relu_(x[:, 0])  # the same operator, known by now
        with pytest.raises(PlacementError, match="a view that is a copy"):
            x[0] = 1.0
        assert torch.equal(x.full_tensor(), whole)

    run_ranks(2, body)


def test_a_view_that_is_a_copy_is_not_read_when_its_source_was_written():
    def body(rank):
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
            with pytest.raises(PlacementError, match="a view that is a copy"):
                read()
        assert torch.equal((x[1] + 1).full_tensor(), whole[1] + 2)

    run_ranks(2, body)


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
def test_a_view_of_a_copy_is_a_copy(view):
    def body(rank):
        whole, x = sharded()
        for _ in range(2):  # as the rules say, and as it is known
            seen = view(x[1])
            assert torch.equal(seen.full_tensor(), view(whole[1]))
            with pytest.raises(PlacementError, match="a view that is a copy"):
                seen.add_(1)
            x.add_(1)
            whole = whole + 1
            with pytest.raises(PlacementError, match="a view that is a copy"):
                seen + 1
        with pytest.raises(PlacementError, match="a view that is a copy"):
            x[1].data.add_(1)
        assert torch.equal(x.full_tensor(), whole)

    run_ranks(2, body)


def test_lists_and_what_is_no_operator_meet_copies():
    def body(rank):
        whole, x = sharded()
        row = x[1]
        with pytest.raises(PlacementError, match="a view that is a copy"):
            torch._foreach_add_([row], 1.0)
        with pytest.raises(PlacementError, match="a view that is a copy"):
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
            with pytest.raises(PlacementError, match="a view that is a copy"):
                read()

    run_ranks(2, body)


def test_what_a_list_operator_writes_is_known_to_autograd():
    def body(rank):
        _, x = sharded()
        x.requires_grad_()
        loss = (x * x).sum()
        with torch.no_grad():
            torch._foreach_mul_([x], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = (x * x).sum()
        with torch.no_grad():  # tensor by tensor, as they lie differently
            torch._foreach_mul_([x], [x.redistribute(placements=[Replicate()])])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:aten.as_strided_copy")
def test_a_view_of_memory():
    """It is taken of parts only if they lie in memory as the whole does."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(12.0).reshape(4, 3)
        x = DTensor.from_local(whole.clone(), mesh)
        cut = x.redistribute(placements=[Shard(0)])
        expected = whole.as_strided((3,), (3,), 1)
        assert torch.equal(x.t().as_strided((3,), (3,), 1).full_tensor(), expected)
        assert torch.equal(cut.as_strided((3,), (3,), 1).full_tensor(), expected)
        assert torch.equal(torch.as_strided_copy(cut.t(), (3,), (3,), 1).full_tensor(), expected)
        x.as_strided((3,), (3,), 1).add_(1)
        assert torch.equal(x.full_tensor()[:3, 1], whole[:3, 1] + 1)
        with pytest.raises(PlacementError, match="a view that is a copy"):
            cut.as_strided((3,), (3,), 1).add_(1)
        turned = x.t().redistribute(placements=[Shard(0)])
        assert torch.equal(turned.as_strided((3,), (3,), 1).full_tensor(), expected + 1)
        gaps = DTensor.from_local(whole.repeat(1, 2)[:, ::2], mesh)
        for unknown in (cut.t(), cut[1:], gaps):
            with pytest.raises(PlacementError, match="memory"):
                unknown.as_strided((3,), (3,), 1)

    run_ranks(2, body)


def test_a_tensor_becomes_a_view_of_itself():
    def body(rank):
        whole, x = sharded()
        x.transpose_(0, 1)
        assert x.shape == (2, 4) and x.placements == (Shard(1),)
        x.unsqueeze_(0).squeeze_(0)
        assert torch.equal((x * 2).full_tensor(), whole.t() * 2)
        assert torch.equal(x.t_().full_tensor(), whole)
        with pytest.raises(PlacementError, match="another shape in place"):
            x.resize_(3)

    run_ranks(2, body)


def test_what_has_no_rule_in_place_is_written_by_its_twin():
    def body(rank):
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

    run_ranks(2, body)


def test_plain_tensors_beside_dtensors():
    """A program's are refused; an index made of a Python list, and what gradients need, are not."""

    def body(rank):
        _, x = sharded()
        x.requires_grad_()
        weight, rows = torch.ones(3, 2), torch.tensor([0, 1])

        class Mixes(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * torch.ones(4, 2)

        mixed = (
            lambda: x + torch.ones(1),
            lambda: x[rows],
            lambda: x[torch.tensor([0, 1])],
            lambda: torch.nn.functional.linear(x, weight),
            lambda: torch.nn.functional.linear(x, torch.ones(3, 2)),
            lambda: torch.cat([x, torch.ones(1, 2)]),
            lambda: Mixes.apply(x).sum().backward(),
        )
        for mix in mixed:
            with pytest.raises(UsageError, match="plain tensor"):
                mix()
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError):
            torch.nn.functional.linear(x, torch.nn.Parameter(weight))
        (grad,) = torch.autograd.grad(x[[0, 2]].sum(), x)
        assert torch.equal(grad.full_tensor(), torch.tensor([[1.0] * 2, [0.0] * 2] * 2))

    run_ranks(2, body)


def test_what_is_moved_lies_in_memory_as_the_whole():
    """So that its views are views of the parts: heads to the front, sharded otherwise, and back."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(2 * 4 * 4 * 3.0).reshape(2, 4, 4, 3)
        x = DTensor.from_local(whole, mesh).redistribute(placements=[Shard(1)])
        heads = x.transpose(1, 2)
        for target in (Shard(1), Shard(0), Replicate()):
            moved = heads.redistribute(placements=[target])
            assert moved.stride() == heads.stride()
            joined = moved.transpose(1, 2).reshape(2, 4, 12)
            assert torch.equal(joined.full_tensor(), whole.reshape(2, 4, 12))
        terms = DTensor.from_local(whole, mesh, [Partial()]).permute(3, 0, 2, 1)
        for target in (Shard(1), Shard(0), Replicate()):
            back = terms.redistribute(placements=[target]).permute(1, 3, 2, 0)
            assert torch.equal(back.reshape(-1).full_tensor(), whole.reshape(-1) * 2)

    run_ranks(2, body)
