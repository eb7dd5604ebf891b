"""Sends that wait for their receives: programs that only work because sends are buffered."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.errors import CommTimeout, PeerLost
from dure.testing import run_ranks
from tests.waiting import PATIENCE_S


def _ring(rank: int, group: dist.ProcessGroup | None = None) -> float:
    """Send to the next rank, then receive from the one before: right only if sends are buffered."""
    n = dist.get_world_size()
    t, sent = torch.zeros(4), torch.full((4,), float(rank))
    dist.send(sent, (rank + 1) % n, group)
    sent.fill_(-1.0)  # it was sent by now
    dist.recv(t, (rank - 1) % n, group)
    return t[0].item()


def test_ring_goes_round_where_sends_are_buffered_and_below_eager_bytes():
    wanted = [2.0, 0.0, 1.0]
    assert run_ranks(3, _ring) == wanted
    assert run_ranks(3, _ring, eager_bytes=16) == wanted


def test_ring_of_sends_that_wait_names_the_rank_that_does_not_receive():
    def body(rank):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(CommTimeout) as caught:
            _ring(rank, group)
        dist.barrier()
        return caught.value.missing

    assert run_ranks(3, body, eager_bytes=15) == [(1,), (2,), (0,)]


def test_programs_that_need_no_buffer_go_on_with_sends_that_wait():
    def body(rank):
        n = dist.get_world_size()
        there, here = (rank + 1) % n, (rank - 1) % n
        t, u = torch.zeros(4), torch.zeros(4)
        work = dist.isend(torch.full((4,), float(rank)), there)
        dist.recv(t, here)
        work.wait()
        if rank % 2:
            dist.recv(u, here)
        dist.send(t, there)
        if rank % 2 == 0:
            dist.recv(u, here)
        dist.barrier()
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(u, group=group)
        return t[0].item(), u[0].item()

    assert run_ranks(4, body, eager_bytes=0) == [(3.0, 5.0), (0.0, 5.0), (1.0, 0.0), (2.0, 1.0)]


def test_send_that_nobody_receives_ends_when_time_is_up_or_its_receiver_leaves():
    late = threading.Event()

    def body(rank):
        hasty = dist.new_group()
        if rank == 1:
            assert late.wait(PATIENCE_S)
            return
        hasty.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(CommTimeout) as caught:
            dist.send(torch.ones(1), 1, group=hasty)
        assert caught.value.missing == (1,)
        work = dist.isend(torch.ones(1), 1)
        late.set()
        with pytest.raises(PeerLost):
            work.wait()

    run_ranks(2, body, eager_bytes=0)
