"""Embedding: padding, counted rows, sharded tables; what gathers nothing."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import Partial, Replicate, Shard
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

INDICES = torch.tensor([[0, 4, 2], [2, 2, 1]])
TABLE = torch.arange(1.0, 16, dtype=torch.float64).reshape(5, 3).requires_grad_()


def test_embedding_with_padding():
    check(lambda w, i: F.embedding(i, w, padding_idx=2), TABLE, INDICES, partial=["sum"])
    check(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), TABLE, INDICES)


def test_tables_are_not_gathered():
    look = lambda w, i: F.embedding(i, w)  # noqa: E731
    whole = [Replicate()]
    assert placed(look, (TABLE, [Shard(0)]), (INDICES, whole)) == [[Partial()]]
    assert placed(look, (TABLE, [Shard(1)]), (INDICES, whole)) == [[Shard(2)]]
    assert placed(look, (TABLE, whole), (INDICES, [Shard(1)])) == [[Shard(1)]]


@on_mesh(2)
def test_a_number_that_is_no_row_raises_on_every_rank(mesh):
    rows = made(mesh, TABLE.detach(), [Shard(0)])
    with pytest.raises(IndexError):
        F.embedding(made(mesh, torch.tensor([1, 7]), [Replicate()]), rows)
