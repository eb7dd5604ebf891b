"""Schedules in CSV files, in pictures, and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from dure.errors import UsageError
from dure.schedules import (
    SCHEDULES,
    draw_svg,
    draw_text,
    find_generator,
    lower,
    make_schedule,
    read_csv,
    simulate,
    write_csv,
)

ROOT = Path(__file__).parents[3]


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
def test_what_does_not_fit_says_what_would(name, stages, ranks, microbatches, fix):
    with pytest.raises(UsageError) as error:
        make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    assert fix in error.value.fix


def test_text_shows_who_idles():
    drawn = draw_text(simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)))
    assert drawn.splitlines() == [
        "rank 0   F0 F1 ····· B0    ·· B1",
        "rank 1   ·· F0 B0    F1 B1    ······",
    ]
    assert simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)).bubbles == (
        1 - 6 / 9,
        1 - 6 / 9,
    )


@pytest.mark.parametrize("generator", SCHEDULES, ids=lambda g: g.name)
def test_pictures_of_the_documentation_are_current(generator):
    stages = 4 * (generator.stages_a_rank or 2)
    schedule = make_schedule(generator.name, stages=stages, microbatches=8, ranks=4)
    drawn = draw_svg(simulate(schedule))
    path = ROOT / "docs" / "pictures" / f"{generator.name}.svg"
    assert path.read_text() == drawn, "run `make pictures`"
    boxes = [
        t.text for t in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert len(boxes) == sum(len(a.parts) for rank in schedule.ranks for a in rank if a)
    assert find_generator(generator.torch_name) is generator
