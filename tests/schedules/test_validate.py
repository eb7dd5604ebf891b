"""Faults in schedules."""

from __future__ import annotations

import pytest

from dure.errors import ScheduleError
from dure.schedules import Schedule, validate
from tests.schedules.brute_force import read


@pytest.mark.parametrize(
    ("schedule", "rank", "index", "action"),
    [
        (read("0F0 0B0 0B0", "1F0 1B0"), 0, 2, "0B0"),
        (read("0B0 0F0", "1F0 1B0"), 0, 0, "0B0"),
        (read("0F0 0B0", "1F0 1W0 1I0"), 1, 1, "1W0"),
        (read("0F0 0B0", "1F0 1I0"), 1, None, "1W0"),
        (read("0F0 0B0 1F0", "1B0"), 0, 2, "1F0"),
        (read("0F0 0B0", "1F0 1B0 1F1"), 1, 2, "1F1"),
        (read("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"), 1, None, "1SEND_B0"),
        (read("0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0"), 0, None, "0I0"),
        (read("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), 0, 0, "0SEND_F0"),
        (read("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"), 0, 2, "0B0"),
        (read("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"), 1, 2, "1SEND_F0"),
        (read("0UNSHARD 0F0 0RESHARD 0B0", "1F0 1B0"), 0, 3, "0B0"),
        (read("0F0 0REDUCE_GRAD 0B0", "1F0 1B0"), 0, 1, "0REDUCE_GRAD"),
        (read("0F0 0B0 0RESHARD", "1F0 1B0"), 0, 2, "0RESHARD"),
        (read("1F0 0F0", "2F0", placement=(0, 0, 1)), 0, 0, "1F0"),
        (  # sends are in another order
            read("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2),
            *(1, 0, "1RECV_F1"),
        ),
    ],
)
def test_faults_are_named(schedule: Schedule, rank: int, index: int | None, action: str):
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert (error.value.rank, error.value.index, error.value.action) == (rank, index, action)
    assert error.value.fix
