"""Messages of the shm backend that are not received, or do not fit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from dure.errors import CommTimeout, Desync
from tests.comm.forked_ranks import Ranks, Slot, caught, join

pytestmark = pytest.mark.needs("engine")


def _receives_nothing(slot: Slot):
    backend = join(slot)
    if slot.rank == 0:
        backend.set_timeout(timedelta(seconds=slot.timeout_s / 100))
        error = caught(lambda: backend.recv(torch.zeros(3), 1, 0, False))
        backend.set_timeout(timedelta(seconds=slot.timeout_s))
        backend.barrier(False)
        return error
    backend.barrier(False)
    return None


def test_message_that_does_not_come_leaves_the_group_of_2_whole(tmp_path):
    with Ranks(2, tmp_path, _receives_nothing) as ranks:
        error = ranks.result(0)
        assert isinstance(error, CommTimeout)
        assert error.missing == (1,)
        assert ranks.result(1) is None


def _second_receive_fits(slot: Slot) -> tuple[type, list[float]] | None:
    backend = join(slot)
    if slot.rank == 1:
        backend.send(torch.full((3,), 7.0), 0, 0, False)
        backend.barrier(False)
        return None
    four, three = torch.zeros(4), torch.zeros(3)
    first, second = backend.recv(four, 1, 0, True), backend.recv(three, 1, 0, True)
    error = caught(first.wait)
    second.wait()
    backend.barrier(False)
    return type(error), four.tolist() + three.tolist()


def test_a_message_goes_to_the_next_receive_that_fits_2_ranks(tmp_path):
    with Ranks(2, tmp_path, _second_receive_fits) as ranks:
        assert ranks.values() == [(Desync, [0.0] * 4 + [7.0] * 3), None]
