"""Messages of the shm backend that do not fit the first receive posted for them."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.errors import Desync
from dure.native import available

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1] or "-")


def _second_receive_fits(rank: int) -> list[float]:
    if rank == 1:
        dist.send(torch.full((3,), 7.0), dst=0)
        return []
    four, three = torch.zeros(4), torch.zeros(3)
    first, second = dist.irecv(four, src=1), dist.irecv(three, src=1)
    with pytest.raises(Desync):
        first.wait()
    second.wait()
    assert not four.any()
    return three.tolist()


def test_a_message_goes_to_the_next_receive_that_fits(process_pool):
    pool = process_pool(2, "shm")
    assert pool.run(_second_receive_fits) == [[7.0] * 3, []]
