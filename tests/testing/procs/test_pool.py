"""The process pool: results, errors, deaths and hangs."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import psutil
import pytest
import torch

import dure as dist
from dure.errors import CommTimeout, LaunchError
from dure.testing import ProcessPool
from tests.waiting import PATIENCE_S


def _sum(rank, factor):
    t = torch.tensor([float(rank) * factor])
    dist.all_reduce(t)
    return t.item(), os.getpid()


def _fail(rank):
    if rank == 1:
        raise KeyError("mine")


def _die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank):
    if rank == 0:
        threading.Event().wait(PATIENCE_S)


def test_pool_runs_many_functions_in_the_same_processes(process_pool):
    pool = process_pool(2, "gloo")
    first, second = pool.run(_sum, 2), pool.run(_sum, 3)
    assert [v for v, _ in first] == [2.0, 2.0]
    assert [v for v, _ in second] == [3.0, 3.0]
    assert [pid for _, pid in first] == [pid for _, pid in second] == pool.pids


def test_pool_takes_and_returns_lambdas_and_closures(process_pool):
    factor, lock = torch.tensor(3.0), threading.Lock()

    def scaled(rank):
        return lambda x: x * factor.item() + rank

    pool = process_pool(2, "gloo")
    assert [fn(2) for fn in pool.run(scaled)] == [6.0, 7.0]
    assert pool.run(lambda rank, fn: fn(rank), lambda x: -x) == [0, -1]
    with pytest.raises(TypeError):
        pool.run(lambda rank: lock)
    assert not pool.broken


def test_pool_error_carries_type_and_traceback_and_poisons():
    with ProcessPool(2, "gloo") as pool:
        with pytest.raises(KeyError) as info:
            pool.run(_fail)
        assert "on rank 1 of 2" in info.value.__notes__[0]
        assert "in _fail" in info.value.__notes__[0]
        assert pool.broken
        with pytest.raises(LaunchError):
            pool.run(_sum, 1)


def test_pool_rank_that_dies_is_named():
    with ProcessPool(2, "gloo") as pool:
        pids = pool.pids
        with pytest.raises(LaunchError) as info:
            pool.run(_die)
        assert info.value.rank == 1
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_pool_hang_shows_the_stack():
    with ProcessPool(2, "gloo") as pool:
        with pytest.raises(CommTimeout) as info:
            pool.run(_hang, timeout=0.3)
        assert info.value.missing == (0,)
        assert "in _hang" in "".join(info.value.__notes__)


def test_a_rank_that_died_between_two_calls_is_a_launch_error():
    with ProcessPool(2, "gloo") as pool:
        victim = psutil.Process(pool.pids[1])
        victim.kill()
        victim.wait(PATIENCE_S)
        with pytest.raises(LaunchError) as caught:
            pool.run(_sum, 1.0)
        assert caught.value.rank == 1
        assert pool.broken


def _ring(rank: int, timeout_s: float) -> float | tuple[str, str]:
    """Send to the next rank, then receive from the one before: right only if sends are buffered."""
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=timeout_s))
    t, n = torch.zeros(4), dist.get_world_size()
    try:
        dist.send(torch.full((4,), float(rank)), (rank + 1) % n, group=group)
        dist.recv(t, (rank - 1) % n, group=group)
    except CommTimeout as error:
        return error.op or "", str(error)
    return t[0].item()


def _in_turn(rank: int) -> float:
    t, n = torch.zeros(4), dist.get_world_size()
    works = [dist.isend(torch.full((4,), float(rank)), (rank + 1) % n)]
    dist.recv(t, (rank - 1) % n)
    works[0].wait()
    return t[0].item()


def test_sends_of_a_pool_wait_for_their_receives_where_that_is_asked_for_2_ranks():
    with ProcessPool(2, "shm", eager_bytes=0) as pool:
        assert pool.run(_in_turn) == [1.0, 0.0]
        for rank, told in enumerate(pool.run(_ring, 0.5)):
            assert isinstance(told, tuple)
            op, text = told
            assert op == "send"
            assert f"rank {1 - rank}" in text  # whom it waits for
    with ProcessPool(2, "shm", eager_bytes=16) as pool:
        assert pool.run(_ring, PATIENCE_S) == [1.0, 0.0]
