"""The public test tools: what they return, and what they say when ranks fail."""

from __future__ import annotations

import threading

import pytest
import torch

import dure as dist
from dure.errors import CommTimeout, PeerLost
from dure.testing import run_ranks


def test_run_ranks_returns_results_in_rank_order():
    assert run_ranks(4, lambda rank, x: (rank, x, dist.get_rank()), "x") == [
        (r, "x", r) for r in range(4)
    ]


@pytest.mark.parametrize("n", [48, pytest.param(128, marks=pytest.mark.slow)])
def test_run_ranks_many_ranks_work(n):
    def body(rank):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        dist.barrier()
        return t.item()

    assert run_ranks(n, body) == [n * (n - 1) / 2] * n


def test_run_ranks_first_error_is_raised_and_others_see_the_loss():
    seen = {}

    def body(rank):
        if rank == 1:
            raise KeyError("mine")
        try:
            dist.barrier()
        except PeerLost as e:
            seen[rank] = e.peer
            raise

    with pytest.raises(KeyError) as info:
        run_ranks(3, body)
    assert "rank 1 of 3" in info.value.__notes__[0]
    assert seen == {0: 1, 2: 1}


def test_run_ranks_that_hang_are_shown(capsys):
    release = threading.Event()

    def body(rank):
        if rank == 1:
            release.wait(20)

    with pytest.raises(CommTimeout) as info:
        run_ranks(2, body, timeout=0.3)
    release.set()
    assert info.value.missing == (1,)
    assert "release.wait(20)" in capsys.readouterr().err


def test_run_ranks_world_of_the_process_is_not_touched():
    run_ranks(2, lambda rank: dist.barrier())
    assert not dist.is_initialized()


def test_run_ranks_one_after_another_are_independent():
    for n in (1, 3, 2):
        assert run_ranks(n, lambda rank: dist.get_world_size()) == [n] * n
