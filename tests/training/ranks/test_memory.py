"""Tensors that ranks share: right values on every backend, however they are cut."""

from __future__ import annotations

import torch

import dure as dist
from dure.testing import run_ranks


def test_shared_empty_reduces_like_any_tensor():
    def body(rank):
        t = dist.shared_empty(3, 5, dtype=torch.float64)
        assert t.shape == (3, 5)
        assert not t.any()
        t += rank
        dist.all_reduce(t)
        part = dist.shared_empty(7)
        part.fill_(1.0)
        dist.all_reduce(part[2:5])
        return t.unique().tolist(), part.tolist()

    assert run_ranks(3, body) == [([3.0], [1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0])] * 3


def test_shared_empty_of_nothing():
    def body(rank):
        return dist.shared_empty(0, 4).shape == (0, 4)

    assert run_ranks(2, body) == [True, True]


def test_all_gather_of_one_element_of_any_stride_2_ranks() -> None:
    def rank_main(rank: int) -> list[float]:
        mine = torch.tensor(float(rank)).expand(1, 1)
        theirs = [torch.empty(1, 1) for _ in range(2)]
        dist.all_gather(theirs, mine)
        return [t.item() for t in theirs]

    assert run_ranks(2, rank_main) == [[0, 1]] * 2
