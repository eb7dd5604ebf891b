"""The process pool: results, errors, deaths and hangs."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest
import torch

import dure as dist
from dure.errors import CommTimeout, LaunchError
from dure.testing import ProcessPool


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
        threading.Event().wait(60)


def _lock(rank):
    return threading.Lock()


def test_pool_runs_many_functions_in_the_same_processes(process_pool):
    pool = process_pool(2, "gloo")
    first, second = pool.run(_sum, 2), pool.run(_sum, 3)
    assert [v for v, _ in first] == [2.0, 2.0]
    assert [v for v, _ in second] == [3.0, 3.0]
    assert [pid for _, pid in first] == [pid for _, pid in second] == pool.pids


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


def test_pool_reply_that_cannot_be_pickled_is_an_error():
    with ProcessPool(1, "gloo") as pool, pytest.raises(LaunchError):
        pool.run(_lock)


def test_a_rank_that_died_between_two_calls_is_a_launch_error():
    with ProcessPool(2, "gloo") as pool:
        victim = psutil.Process(pool.pids[1])
        victim.kill()
        victim.wait(10)
        with pytest.raises(LaunchError) as caught:
            pool.run(_sum, 1.0)
        assert caught.value.rank == 1
        assert pool.broken
