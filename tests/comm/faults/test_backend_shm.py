"""The shm backend when ranks fork, or are interrupted: what the table leaves out."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from dure.comm.ops import ReduceOp
from dure.errors import PeerLost
from tests.comm.forked_ranks import Ranks, Slot, caught, join, while_waiting

pytestmark = pytest.mark.needs("engine")

SUM = ReduceOp.SUM


def _forks_and_dies(slot: Slot):
    backend = join(slot)
    x = torch.ones(4)
    if slot.rank == 1:
        if os.fork() == 0:
            os._exit(0)  # takes nothing of its parent's with it
        os.wait()
        backend.all_reduce(x, SUM, False)
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)  # outlives its parent, by a little
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    backend.all_reduce(x, SUM, False)
    lost = caught(lambda: backend.all_reduce(x, SUM, False))
    backend.close(False)
    return lost


def test_forked_child_neither_is_nor_keeps_its_rank_of_3(tmp_path):
    with Ranks(3, tmp_path, _forks_and_dies) as ranks:
        for rank in (0, 2):
            error = ranks.result(rank)
            assert isinstance(error, PeerLost)
            assert (error.peer, error.pid) == (1, ranks.pids[1])


def _is_interrupted(slot: Slot, operation: str):
    backend = join(slot)
    x = torch.ones(3)
    if slot.rank == 0:
        backend.barrier(False)
        try:
            while_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            if operation == "recv":
                backend.recv(x, 1, 0, False)
            elif operation == "wait":
                backend.recv(x, 1, 0, True).wait()
            else:
                backend.all_reduce(x, SUM, False)
        except KeyboardInterrupt:
            return "interrupted"
        return None
    backend.barrier(False)
    return caught(lambda: backend.recv(x, 0, 5, False))  # until rank 0 has gone


@pytest.mark.parametrize("operation", ["all_reduce", "recv", "wait"])
def test_interrupt_ends_a_wait_of_2_ranks(tmp_path, operation):
    with Ranks(2, tmp_path, _is_interrupted, operation) as ranks:
        assert ranks.result(0) == "interrupted"
        assert isinstance(ranks.result(1), PeerLost)
