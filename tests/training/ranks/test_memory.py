"""Tensors that ranks share: right values on every backend, however they are cut."""

import torch

import dure as dist
from tests.thread_ranks import on_ranks


@on_ranks(3)
def test_shared_empty_reduces_like_any_tensor(rank):
    t = dist.shared_empty(3, 5, dtype=torch.float64)
    assert t.shape == (3, 5)
    assert not t.any()
    t += rank
    dist.all_reduce(t)
    part = dist.shared_empty(7)
    part.fill_(1.0)
    dist.all_reduce(part[2:5])
    assert (t.unique().tolist(), part.tolist()) == ([3.0], [1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0])
