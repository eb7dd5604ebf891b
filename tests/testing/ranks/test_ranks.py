"""Ranks as threads: what `run_ranks` returns, and what it says when ranks fail."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import dure as dist
from dure.errors import CommTimeout, PeerLost
from dure.testing import ranks, run_ranks
from tests.waiting import PATIENCE_S


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


def test_run_ranks_that_hang_are_shown(capsys, monkeypatch):
    hanging, release = threading.Event(), threading.Event()
    looks = itertools.count()

    def monotonic() -> float:
        """Say that time is up when rank 1 is waited for and hangs; rank 0 has ended before."""
        is_up = next(looks) >= 2 and hanging.wait(PATIENCE_S)
        return PATIENCE_S if is_up else 0.0

    def body(rank):
        if rank == 1:
            hanging.set()
            release.wait(PATIENCE_S)

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(CommTimeout) as info:
        run_ranks(2, body, timeout=PATIENCE_S)
    release.set()
    assert info.value.missing == (1,)
    assert "release.wait(PATIENCE_S)" in capsys.readouterr().err


def test_run_ranks_raises_the_error_of_ranks_that_wait_for_each_other(monkeypatch):
    looks = itertools.count()

    def monotonic() -> float:
        """Say that time is up at the first wait: the ranks' own timeouts end later."""
        return PATIENCE_S if next(looks) else 0.0

    def body(rank):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=0.1))
        dist.send(torch.ones(4), 1 - rank, group)

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(ranks, "_GRACE_S", PATIENCE_S, raising=False)
    with pytest.raises(CommTimeout) as info:
        run_ranks(2, body, eager_bytes=0, timeout=PATIENCE_S)
    assert info.value.op == "send"
    assert info.value.missing in {(0,), (1,)}
