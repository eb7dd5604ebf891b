"""Functional collectives: new tensors, ranks and groups; the parity tests have the values."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.comm import functional as F
from dure.errors import NotInGroupError, ShapeError, UsageError
from dure.nn import functional as nnF
from dure.tensor import DTensor, Shard
from dure.testing import run_ranks
from tests.thread_ranks import on_mesh, on_ranks


def test_coalesced_forms_take_several_tensors():
    def body(rank):
        one, two = torch.full((2,), float(rank)), torch.full((2, 2), rank + 1.0)
        summed = F.all_reduce_coalesced([one, two], "sum")
        joined = F.all_gather_into_tensor_coalesced([one, two])
        parts = F.reduce_scatter_tensor_coalesced([one, two], "sum", [0, 1])
        return [[t.tolist() for t in tensors] for tensors in (summed, joined, parts)]

    summed = [[1, 1], [[3, 3], [3, 3]]]
    joined = [[0, 0, 1, 1], [[1, 1], [1, 1], [2, 2], [2, 2]]]
    assert run_ranks(2, body) == [[summed, joined, [[1], [[3], [3]]]]] * 2


@on_mesh(2, 2, names=("dp", "tp"))
def test_group_may_be_ranks_a_name_or_an_axis_of_a_mesh(mesh):
    rank = dist.get_rank()
    x = torch.tensor([2.0**rank])
    ranks = [0, 1] if rank < 2 else [2, 3]
    with pytest.raises(UsageError):
        F.all_reduce(x, "sum", mesh)
    with pytest.raises(UsageError):
        F.all_reduce(x, "sum", [0, 3])
    with pytest.raises(NotInGroupError):
        F.all_reduce(x, "sum", dist.GroupMember.NON_GROUP_MEMBER)
    assert [
        F.all_reduce(x, "sum", (mesh, 0)).item(),
        F.all_reduce(x, "sum", (mesh, "tp")).item(),
        F.all_reduce(x, "sum", ranks).item(),
        F.all_reduce(x, "sum", (0, 1, 2, 3)).item(),
        nnF.all_reduce(x, group=mesh.get_group(0).group_name).item(),
    ] == [
        [5, 3, 3, 15, 5],
        [10, 3, 3, 15, 10],
        [5, 12, 12, 15, 5],
        [10, 12, 12, 15, 10],
    ][rank]


@on_ranks(2)
def test_misuse_is_refused(rank):
    with pytest.raises(ShapeError):
        F.reduce_scatter_tensor(torch.ones(3), "sum", 0)
    with pytest.raises(ShapeError):
        F.all_gather_tensor(torch.ones(3), 1)
    with pytest.raises(UsageError):
        F.all_to_all_single(torch.ones(2), [1, 1], None)
    with pytest.raises(UsageError):
        F.permute_tensor(torch.ones(2), [0, 0])
    with pytest.raises(ShapeError):
        nnF.scatter([torch.ones(2), torch.ones(3)])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UsageError, match="gradient"):
        F.all_reduce(x, "max").sum().backward()


@on_mesh(2)
def test_a_dtensor_is_refused_with_what_to_pass(mesh):
    own = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    for x in (own, own.detach().requires_grad_()):
        for name, call in (
            ("all_reduce", lambda x=x: F.all_reduce(x, "sum", mesh)),
            ("broadcast", lambda x=x: F.broadcast(x, 0, mesh)),
            ("all_gather", lambda x=x: F.all_gather_tensor(x, 0, mesh)),
            ("reduce_scatter", lambda x=x: F.reduce_scatter_tensor(x, "sum", 0, mesh)),
        ):
            with pytest.raises(UsageError, match=r"to_local\(\)") as caught:
                call()
            assert name in str(caught.value)
    assert F.all_reduce(own.to_local(), "sum", mesh).tolist() == [2, 2]
