"""Actions, schedules by name, their files, where transfers are put, and faults."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from dure.errors import ScheduleError, UsageError
from dure.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    find_generator,
    loop_placement,
    lower,
    make_schedule,
    read_csv,
    v_placement,
    validate,
    write_csv,
)
from tests.schedules.brute_force import read


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("12F3", Kind.FORWARD),
        ("12B3", Kind.FULL_BACKWARD),
        ("12I3", Kind.BACKWARD_INPUT),
        ("12W3", Kind.BACKWARD_WEIGHT),
        ("12SEND_F3", Kind.SEND_F),
        ("12RECV_B3", Kind.RECV_B),
        ("12UNSHARD", Kind.UNSHARD),
        ("12RESHARD", Kind.RESHARD),
        ("12REDUCE_GRAD", Kind.REDUCE_GRAD),
    ],
)
def test_text_and_back(text, kind):
    action = Action(12, kind, 3) if "3" in text else Action(12, kind)
    assert str(action) == text
    assert Action.parse(f" {text} ") == action
    both = Action(-1, Kind.OVERLAP_F_B, None, (Action.parse("0F1"), Action.parse("1B0")))
    assert Action.parse("(0F1;1B0)OVERLAP_F_B") == both


@pytest.mark.parametrize(
    "text",
    [
        *("", "F1", "0F", "0X1", "0UNSHARD1", "-1F0"),
        *("0OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0F1;0SEND_F0)OVERLAP_F_B"),
    ],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UsageError) as error:
        Action.parse(text)
    assert repr(text) in error.value.seen
    assert "2F0" in error.value.fix


def test_placements():
    assert loop_placement(6, 3) == (0, 1, 2, 0, 1, 2)
    assert v_placement(9, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(UsageError) as error:
        v_placement(7, 3)
    assert "6 stages" in error.value.fix


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches", "fix"),
    [
        ("1f1b", 8, 4, 8, "4 stages, or take interleaved-1f1b."),
        ("1f1b", 7, 4, 8, "4 stages."),
        ("ZBVZeroBubble", 6, 2, 8, "4 stages"),
        ("dualpipe-v", 4, 2, 3, "4 microbatches"),
        ("interleaved-1f1b", 4, 2, 5, "Take 4 or 6 microbatches"),
        ("looped-bfs", 5, 2, 4, "4 stages"),
        ("gpipe", 2, 2, 0, "1 microbatches"),
        ("gpipe", 2, 0, 2, "Take 1."),
        ("2f2b", 2, 2, 2, "1f1b, interleaved-1f1b"),
    ],
)
def test_the_error_of_a_misfit_says_what_fits(name, stages, ranks, microbatches, fix):
    with pytest.raises(UsageError) as error:
        make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    assert fix in error.value.fix


def test_schedules_are_found_by_torchs_names():
    assert all(find_generator(generator.torch_name) is generator for generator in SCHEDULES)


def test_places_of_transfers_and_of_actions_on_stages():
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


@pytest.mark.parametrize("generator", SCHEDULES, ids=lambda g: g.name)
def test_files_hold_what_was_written(generator, tmp_path):
    stages = 2 * (generator.stages_a_rank or 2)
    schedule = make_schedule(generator.torch_name.upper(), stages=stages, microbatches=4, ranks=2)
    path = tmp_path / f"{generator.name}.csv"
    write_csv(schedule, path)
    assert read_csv(path) == schedule
    write_csv(lower(schedule), path)
    assert read_csv(path, "compute_comms") == lower(schedule)


def test_a_file_is_a_row_a_rank_and_a_cell_a_step(tmp_path):
    path = tmp_path / "own.csv"
    write_csv(make_schedule("1f1b", stages=2, microbatches=2, ranks=2), path)
    assert path.read_bytes() == b"0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    idle = tmp_path / "idle.csv"
    idle.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    assert read_csv(idle).actions(0) == read_csv(path).actions(0)


@pytest.mark.parametrize(
    ("text", "format", "place", "cell"),
    [
        ("0F0,0B0\n1F0,1X0\n", "compute_only", "row 2, column 2", "'1X0'"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "compute_only", "row 1, column 2", "'0SEND_F0'"),
        ("0F0,0B0\n1F0,1B0,0F1\n", "compute_only", "row 2, column 3", "0F1"),
        ("0F0,,0B0\n,1B0,1F0\n", "compute_only", "row 2, column 2", "1B0"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0,1B0\n",
            "compute_comms",
            "row 2, column 3",
            "1SEND_B0",
        ),
        ("0F0,0B0\n2F0,2B0\n", "compute_only", "own.csv", "stage 1"),
    ],
)
def test_faults_in_files_are_named(text, format, place, cell, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_csv(path, cast("Any", format))
    assert place in error.value.seen and cell in str(error.value)


def test_what_is_not_a_file_of_a_schedule_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "odd.csv").write_bytes(b"\xff")
    for path in (tmp_path / "pipe.csv", tmp_path / "odd.csv", tmp_path / "absent.csv", "/dev/zero"):
        with pytest.raises(UsageError):
            read_csv(path)


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
