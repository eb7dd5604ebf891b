"""The proof that a schedule is free of deadlock: as by brute force, and the cycle is named."""

from __future__ import annotations

import random

import pytest

from dure.errors import ScheduleError
from dure.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    lower,
    make_schedule,
    prove_no_deadlock,
    simulate,
    validate,
)
from tests.schedules.brute_force import comes_to_its_end, read


def mutate(schedule: Schedule, rng: random.Random) -> tuple[str, Schedule]:
    """Return a schedule with a fault of some kind, or maybe none if it is an exchange."""
    lists = [schedule.actions(rank) for rank in range(len(schedule.ranks))]
    actions = lists[rng.randrange(len(lists))]
    what = rng.choice(["drop", "duplicate", "swap", "swap", "rotate", "rotate"])
    i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
    if what == "drop":
        what = "drop REDUCE_GRAD" if actions[i].kind.of_stage else what  # which may be left out
        del actions[i]
    elif what == "duplicate":
        actions.insert(j, actions[i])
    elif what == "swap":
        actions[i], actions[j] = actions[j], actions[i]
    else:  # some neighbors, on every rank
        for each in lists:
            begin = rng.randrange(len(each))
            part = each[begin : begin + rng.randrange(2, 6)]
            rng.shuffle(part)
            each[begin : begin + len(part)] = part
    return what, schedule.with_ranks(lists)


@pytest.mark.parametrize("count", [400, pytest.param(2500, marks=pytest.mark.slow)])
def test_faults_are_found_as_by_brute_force(count: int):
    rng = random.Random(0)
    valid = cyclic = refused = 0
    for _ in range(count):
        generator = rng.choice(SCHEDULES)
        ranks = rng.randint(2, 4)
        each = generator.stages_a_rank or rng.randint(1, 2)
        m = ranks * (each if generator.microbatches_a_stage else 1)
        m *= rng.randint(1, 2)
        grid = make_schedule(generator.name, stages=ranks * each, microbatches=m, ranks=ranks)
        what, faulty = mutate(lower(grid), rng)
        try:
            validate(faulty)
        except ScheduleError:
            refused += 1
        else:
            valid += 1
            assert what not in ("drop", "duplicate")
        if what == "duplicate":  # no matter for the proof, which asks for valid lists
            continue
        try:
            prove_no_deadlock(faulty)
        except ScheduleError as error:
            assert not comes_to_its_end(faulty)
            cyclic += bool(error.cycle)
            check_cycle(faulty, error.cycle)
        else:
            assert comes_to_its_end(faulty)
    assert min(valid, cyclic, refused) > count / 20, (valid, cyclic, refused)


def check_cycle(schedule: Schedule, cycle: tuple[tuple[int, str], ...]) -> None:
    """Each action of a cycle waits for its other end on the next rank."""
    for (rank, text), (after, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        action = Action.parse(text)
        assert action in schedule.actions(rank)
        assert schedule.placement[action.other_end.stage] == after


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
