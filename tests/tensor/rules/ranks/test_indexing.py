"""Indexing: one element per line of a sharded dimension, such as the logit of a label."""

import pytest
import torch

from dure.tensor import Partial, Replicate, Shard
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

SCORES = torch.arange(1.0, 16, dtype=torch.float64).reshape(3, 5).requires_grad_()
LABELS = torch.tensor([[4], [0], [2]])


def pick(scores, labels):
    return scores.gather(1, labels)


def test_one_element_per_line_is_gathered_where_it_is():
    check(pick, SCORES, LABELS, partial=["sum", "max"])
    whole = [Replicate()]
    assert placed(pick, (SCORES, [Shard(1)]), (LABELS, whole)) == [[Partial()]]
    assert placed(pick, (SCORES, [Shard(1)]), (LABELS, whole), n=6) == [[Partial()]]
    assert placed(pick, (SCORES, [Shard(0)]), (LABELS, [Shard(0)])) == [[Shard(0)]]
    both = LABELS.expand(3, 2)
    assert placed(pick, (SCORES, [Shard(1)]), (both, whole)) == [[Replicate()]]
    mask = SCORES.detach() > 7
    assert placed(pick, (mask, [Shard(1)]), (LABELS, whole)) == [[Replicate()]]


@pytest.mark.parametrize("label", [5, -1])
@on_mesh(2)
def test_an_index_out_of_bounds_raises_on_every_rank(mesh, label):
    scores = made(mesh, SCORES.detach(), [Shard(1)])
    labels = made(mesh, torch.tensor([[1], [label], [1]]), [Replicate()])
    with pytest.raises(RuntimeError):
        pick(scores, labels)
