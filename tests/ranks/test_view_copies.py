"""Views of sharded tensors: those that share memory with their source, and those that cannot."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch

from dure.errors import PlacementError, UsageError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
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


def test_a_tensor_becomes_a_view_of_itself():
    def body(rank):
        whole, x = sharded()
        x.transpose_(0, 1)
        assert x.shape == (2, 4) and x.placements == (Shard(1),)
        x.unsqueeze_(0).squeeze_(0)
        assert torch.equal((x * 2).full_tensor(), whole.t() * 2)
        assert torch.equal(x.t_().full_tensor(), whole)
        with pytest.raises(PlacementError, match="changes a DTensor's shape in place"):
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
