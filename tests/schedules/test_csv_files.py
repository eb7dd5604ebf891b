"""Files of schedules."""

import os
from typing import Any, cast

import pytest

from dure.errors import UsageError
from dure.schedules import SCHEDULES, lower, make_schedule, read_csv, write_csv


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
