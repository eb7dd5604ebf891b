"""Every schedule is whole, comes to its end, and takes the time that is foretold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import ScheduleError
from dure.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    forward_only,
    gpipe,
    lower,
    make_schedule,
    one_f_one_b,
    prove_no_deadlock,
    simulate,
    validate,
)
from unit.schedules.brute import comes_to_its_end, ends


@st.composite
def grids(draw: st.DrawFn) -> Schedule:
    generator = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 5))
    each = generator.stages_a_rank or draw(st.integers(1, 3))
    least = max(1, generator.microbatches_a_stage * ranks * each)
    microbatches = draw(st.integers(least, least + 9))
    if generator.name.startswith("interleaved"):
        microbatches -= microbatches % max(1, microbatches // ranks)
    return make_schedule(
        generator.name, stages=ranks * each, microbatches=microbatches, ranks=ranks
    )


@settings(max_examples=80, deadline=None)
@given(grid=grids(), data=st.data())
def test_whole_free_of_deadlock_and_as_long_as_foretold(grid: Schedule, data: st.DataObject):
    times = st.integers(0, 9)
    kinds = ["F", "I", "W", "SEND_F", "RECV_B", "REDUCE_GRAD"]
    table = {kind: [data.draw(times) for _ in range(grid.stages)] for kind in kinds}
    send_time = data.draw(times)

    def time_of(action: Action) -> float:
        if action.kind == "B":
            return table["I"][action.stage] + table["W"][action.stage]
        if action.kind == "OVERLAP_F_B":
            return sum(map(time_of, action.parts))
        return table[action.kind][action.stage] if action.kind in table else 0

    sharded = data.draw(st.sets(st.integers(0, grid.stages - 1)))
    listed = lower(grid, sharded=sharded)
    deferred = lower(grid, sharded=sharded, defer_receives=True)
    peaks = validate(grid)
    for schedule in (grid, listed, deferred):
        assert validate(schedule) == peaks
        prove_no_deadlock(schedule)
        assert comes_to_its_end(schedule)
        found = simulate(schedule, table, send_time=send_time)
        assert found.peak_bytes == peaks
        expected = ends(schedule, time_of, send_time)
        assert [[span.end for span in spans] for spans in found.spans] == expected
    for rank, actions in enumerate(listed.ranks):
        computed = [a for a in actions if a is not None and a.kind.is_compute]
        assert computed == grid.actions(rank)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("rounds", [2, 5])
def test_bubbles_and_activations_are_those_of_the_literature(p: int, rounds: int):
    m = rounds * p
    filling, both = p - 1, 2
    expected = {  # name -> bubble, most activations of half a rank's stages
        "gpipe": (filling / (m + filling), 2 * m),
        "1f1b": (filling / (m + filling), 2 * p),
        "interleaved-1f1b": (filling / (both * m + filling), 2 * p + filling),
        "looped-bfs": (filling / (both * m + filling), 2 * m),
        "interleaved-zero-bubble": (filling / (6 * m + filling), 2 * p),
        "zb-v": (filling / (6 * m + filling), 2 * p),
        "dualpipe-v": (None, 2 * p + 1),
    }
    for name, (bubble, activations) in expected.items():
        each = 1 if name in ("gpipe", "1f1b") else both
        grid = make_schedule(name, stages=each * p, microbatches=m, ranks=p)
        found = simulate(grid, activation_bytes=both / each)
        assert max(found.peak_bytes) == activations, name
        assert bubble is None or found.bubble == pytest.approx(bubble), name
    assert validate(make_schedule("1f1b", stages=4, microbatches=8, ranks=4)) == (4, 3, 2, 1)
    assert validate(forward_only((0, 1), 3)) == (1, 1)
    assert simulate(gpipe((0, 1), 3), activation_bytes=[2, 5]).peak_bytes == (6, 15)


def test_stages_may_lie_anywhere():
    for make in (gpipe, one_f_one_b, forward_only):
        schedule = make((2, 0, 1), 4)
        assert max(validate(lower(schedule))) <= 4
        prove_no_deadlock(schedule)
        assert simulate(schedule).step_time == simulate(make((0, 1, 2), 4)).step_time


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
    else:  # some neighbours, anew and on every rank
        for each in lists:
            begin = rng.randrange(len(each))
            part = each[begin : begin + rng.randrange(2, 6)]
            rng.shuffle(part)
            each[begin : begin + len(part)] = part
    return what, schedule.with_ranks(lists)


def test_faults_are_found_as_by_brute_force():
    rng = random.Random(0)
    valid = cyclic = refused = 0
    for _ in range(2500):
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
    assert min(valid, cyclic, refused) > 200, (valid, cyclic, refused)


def check_cycle(schedule: Schedule, cycle: tuple[tuple[int, str], ...]) -> None:
    """Each action of a cycle waits for its other end on the next rank."""
    for (rank, text), (after, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        action = Action.parse(text)
        assert action in schedule.actions(rank)
        assert schedule.placement[action.other_end.stage] == after


def read(*ranks: str, microbatches: int, placement: tuple[int, ...]) -> Schedule:
    lists = tuple(tuple(map(Action.parse, rank.split())) for rank in ranks)
    return Schedule(lists, placement, microbatches)


def test_where_transfers_and_whole_stages_stand():
    grid = make_schedule("1f1b", stages=3, microbatches=2, ranks=3)
    text = [" ".join(map(str, actions)) for actions in lower(grid, sharded={0, 2}).ranks]
    assert text == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 "
        "1B1 1SEND_B1 1REDUCE_GRAD",
        "2UNSHARD 2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2REDUCE_GRAD 2RESHARD",
    ]
    deferred = lower(grid, defer_receives=True).actions(1)
    assert " ".join(map(str, deferred)).startswith("1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1")


def test_the_cycle_is_named():
    crossed = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
        placement=(0, 1),
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
                placement=(0, 1),
            )
        )
    side_by_side = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
        microbatches=2,
        placement=(0, 1),
    )
    prove_no_deadlock(side_by_side)


@pytest.mark.parametrize(
    ("ranks", "rank", "index", "action"),
    [
        (("0F0 0B0 0B0", "1F0 1B0"), 0, 2, "0B0"),
        (("0B0 0F0", "1F0 1B0"), 0, 0, "0B0"),
        (("0F0 0B0", "1F0 1W0 1I0"), 1, 1, "1W0"),
        (("0F0 0B0", "1F0 1I0"), 1, None, "1W0"),
        (("0F0 0B0 1F0", "1B0"), 0, 2, "1F0"),
        (("0F0 0B0", "1F0 1B0 1F1"), 1, 2, "1F1"),
        (("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"), 1, None, "1SEND_B0"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), 0, 0, "0SEND_F0"),
        (("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"), 0, 2, "0B0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"), 1, 2, "1SEND_F0"),
        (("0UNSHARD 0F0 0RESHARD 0B0", "1F0 1B0"), 0, 3, "0B0"),
        (("0F0 0REDUCE_GRAD 0B0", "1F0 1B0"), 0, 1, "0REDUCE_GRAD"),
        (("0F0 0B0 0RESHARD", "1F0 1B0"), 0, 2, "0RESHARD"),
    ],
)
def test_what_is_wrong_is_named(ranks: tuple[str, ...], rank: int, index: int | None, action: str):
    with pytest.raises(ScheduleError) as error:
        validate(read(*ranks, microbatches=1, placement=(0, 1)))
    assert (error.value.rank, error.value.index, error.value.action) == (rank, index, action)
    assert error.value.fix


def test_receives_in_another_order_than_sends_are_refused():
    with pytest.raises(ScheduleError) as error:
        validate(
            read(
                "0F0 0SEND_F0 0F1 0SEND_F1",
                "1RECV_F1 1RECV_F0 1F0 1F1",
                microbatches=2,
                placement=(0, 1),
            )
        )
    assert (error.value.rank, error.value.index, error.value.action) == (1, 0, "1RECV_F1")
    assert "0SEND_F0" in error.value.seen


def test_a_rank_that_waits_for_nothing_is_named():
    with pytest.raises(ScheduleError) as error:
        prove_no_deadlock(
            read("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0", microbatches=1, placement=(0, 1))
        )
    assert (error.value.rank, error.value.action) == (0, "0RECV_B0")
    assert "1SEND_B0" in error.value.fix


def test_a_grid_in_a_circle_is_refused():
    grid = read("1F0 0F0", "2F0", microbatches=1, placement=(0, 0, 1))
    with pytest.raises(ScheduleError) as error:
        validate(grid)
    assert error.value.action == "1F0"
    crossed = read("0F0 2F0 0B0 2B0", "1F0 1B0", microbatches=1, placement=(0, 1, 0))
    with pytest.raises(ScheduleError) as error:
        simulate(crossed)
    assert error.value.cycle == ((0, "0B0"), (1, "1B0"))
