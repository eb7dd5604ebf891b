"""all_to_all_single: ranks that give split sizes meet ranks that give none."""

from __future__ import annotations

import numpy as np
import torch

import dure as dist
from dure.testing import run_ranks


def test_equal_splits_meet_no_splits():
    def body(rank):
        rows = torch.arange(6.0).view(3, 2) + 10 * rank
        out = torch.empty(3, 2)
        splits = [1, 1, 1] if rank == 1 else None
        dist.all_to_all_single(out, rows, splits, splits)
        return out[:, 0].tolist()

    assert run_ranks(3, body) == [[2.0 * r, 10 + 2.0 * r, 20 + 2.0 * r] for r in range(3)]


def test_uneven_splits_meet_a_rank_whose_parts_are_equal():
    gives = [[1, 1], [1, 3]]
    takes = [[1, 1], [1, 3]]

    def body(rank):
        rows = torch.full((sum(gives[rank]),), float(rank))
        out = torch.empty(sum(takes[rank]))
        even = rank == 0
        dist.all_to_all_single(
            out, rows, None if even else takes[rank], None if even else gives[rank]
        )
        return out.tolist()

    assert run_ranks(2, body) == [[0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]


def test_splits_and_ranks_may_be_arrays_and_sizes():
    def body(rank):
        group = dist.new_group(torch.arange(2) if rank == 0 else np.arange(2))
        assert all(type(r) is int for r in dist.get_process_group_ranks(group))
        out = torch.empty(4)
        splits = (np.array([2, 2]), torch.tensor([2, 2]))[rank]
        dist.all_to_all_single(
            out, torch.full((4,), float(rank)), splits, torch.Size([2, 2]), group
        )
        return out.tolist()

    assert run_ranks(2, body) == [[0.0, 0.0, 1.0, 1.0]] * 2
