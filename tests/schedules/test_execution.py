"""The proof that a schedule is free of deadlock: as by brute force, and the cycle is named."""

import pytest

from dure.errors import ScheduleError
from dure.schedules import prove_no_deadlock, simulate, validate
from tests.schedules.brute_force import read


def test_the_cycle_is_named():
    crossed = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    validate(crossed)
    with pytest.raises(ScheduleError) as error:
        prove_no_deadlock(crossed)
    assert set(error.value.cycle) == {(0, "0SEND_F1"), (1, "1SEND_B0")}
    assert "rank 0 at 0SEND_F1 (index 3) waits for 1RECV_F1 of rank 1" in error.value.seen
    with pytest.raises(ScheduleError):  # 0F1 is no transfer: 0RECV_B0 is in the next batch
        prove_no_deadlock(
            read(
                "0F0 0SEND_F0 0SEND_F1 0F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
                microbatches=2,
            )
        )
    side_by_side = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    prove_no_deadlock(side_by_side)


def test_a_rank_that_waits_for_nothing_is_named():
    with pytest.raises(ScheduleError) as error:
        prove_no_deadlock(read("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0"))
    assert (error.value.rank, error.value.action) == (0, "0RECV_B0")
    assert "1SEND_B0" in error.value.fix


def test_ranks_of_a_grid_that_wait_for_each_other_are_named():
    crossed = read("0F0 2F0 0B0 2B0", "1F0 1B0", placement=(0, 1, 0))
    with pytest.raises(ScheduleError) as error:
        simulate(crossed)
    assert error.value.cycle == ((0, "0B0"), (1, "1B0"))
