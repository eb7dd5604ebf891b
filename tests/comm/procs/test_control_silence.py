"""A leader whose interpreter is busy lives; the kernels of both hosts keep its channels."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch

import dure as dist
from dure.testing import ProcessPool

pytestmark = pytest.mark.needs("engine")

_HELD_S = 4  # longer than any silence that a thread of the interpreter's would cause


def _reduce_after_a_long_call(rank: int) -> float:
    """Reduce when rank 0 has kept Python's lock in one call of C."""
    os.environ["DURE_SILENCE"] = "2"
    group = dist.new_group()
    dist.barrier(group)
    if rank == 0:
        ctypes.PyDLL(None).sleep(_HELD_S)  # which does not release the lock
    ones = torch.ones(4)
    dist.all_reduce(ones, group=group)
    return ones.sum().item()


def test_ranks_that_keep_pythons_lock_longer_than_the_silence_are_waited_for():
    with ProcessPool(2, None, hosts="ab") as pool:
        began = time.monotonic()
        assert pool.run(_reduce_after_a_long_call) == [8.0, 8.0]
        assert time.monotonic() - began >= _HELD_S
