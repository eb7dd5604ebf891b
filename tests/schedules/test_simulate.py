"""The simulator: times as by brute force, bubbles and activations as in the literature."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    Span,
    forward_only,
    gpipe,
    lower,
    make_schedule,
    prove_no_deadlock,
    simulate,
    validate,
)
from tests.schedules.brute_force import comes_to_its_end, ends
from tests.work_counts import kept_objects, num_bytecodes


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


@settings(max_examples=20)
@given(grid=grids(), data=st.data())
def test_complete_free_of_deadlock_and_as_long_as_simulated(grid: Schedule, data: st.DataObject):
    """Compare its proof and its times, with every kind of transfers, with brute force."""
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


def test_work_per_action_is_the_same_for_256_ranks_as_for_16():
    work: dict[int, float] = {}
    for ranks in (16, 256):
        grid = make_schedule("1f1b", stages=ranks, microbatches=4, ranks=ranks)
        listed = lower(grid)
        steps = (
            lambda grid=grid: lower(grid),
            lambda listed=listed: validate(listed),
            lambda listed=listed: prove_no_deadlock(listed),
            lambda listed=listed: simulate(listed),
        )
        # Each of 4 microbatches is computed twice per stage, and sent and received twice over the
        # borders between stages.
        work[ranks] = sum(map(num_bytecodes, steps)) / (8 * ranks + 16 * (ranks - 1))
    assert work[256] < 1.1 * work[16]


def test_a_simulation_keeps_no_object_per_action():
    """Garbage collections visited the spans of large pipelines for half of the time."""
    listed = lower(make_schedule("1f1b", stages=16, microbatches=64, ranks=16))
    assert kept_objects(lambda: simulate(listed)) < 10 * 16  # of 5,888 actions


def test_spans_are_read_like_a_tuple():
    spans = simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)).spans[1]
    expected = ("1F0", 1.0, 2.0), ("1B0", 2.0, 4.0), ("1F1", 4.0, 5.0), ("1B1", 5.0, 7.0)
    made = [Span(Action.parse(text), start, end) for text, start, end in expected]
    assert [*spans] == made
    assert (len(spans), spans[-1]) == (4, made[3])
    assert [*spans[1:3]] == made[1:3]
    again = simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)).spans[1]
    assert (spans == again, hash(spans)) == (True, hash(again))
    assert spans != spans[:3]
