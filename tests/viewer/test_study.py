"""What a page makes of files: collectives, timelines, ranks that are together."""

from pathlib import Path

import pytest

from dure.trace.merging import read
from dure.viewer import study
from dure.viewer.view import Site
from tests.trace.made_up import record, write
from tests.viewer.made_steps import MS, phases


def test_collectives_take_what_the_last_rank_took(tmp_path: Path) -> None:
    # #1: rank 0 waits 3 ms for the others, which take 1 ms; 400 bytes in 1 ms are 0.0004 GB/s.
    write(tmp_path, 0, [record(0, 1, end_ns=5 * MS)])
    for rank in (1, 2):
        write(tmp_path, rank, [record(rank, 1, start_ns=4 * MS, end_ns=5 * MS)])
    (found,) = study.collectives(read(tmp_path))
    assert (found.op, found.group, found.ranks, found.calls, found.nbytes) == (
        "all_reduce",
        "world",
        3,
        1,
        400,
    )
    assert found.ms == 1.0
    assert found.gbs == pytest.approx(400 / 1e6)
    assert found.late_ms == pytest.approx(1.0)  # (3 + 0 + 0) / 3


def test_ranks_in_the_same_call_are_told_together() -> None:
    sites = [
        Site(ranks=[0], call="a", at="x:1", how="ended"),
        Site(ranks=[1], call="b", at="x:2", how="ended"),
        Site(ranks=[2], call="a", at="x:1", how="ended"),
    ]
    assert [(s.ranks, s.call) for s in study.together(sites)] == [([0, 2], "a"), ([1], "b")]
    assert sites[0].ranks == [0]


def test_timeline_is_the_last_whole_step(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [], {"spans": phases(rank, 3)})
    shown = study.timeline(read(tmp_path))
    assert shown.length_ms == 20.0
    assert [(name, start, end) for name, _, start, end in shown.rows[1].bars] == [
        ("forward", 0.0, 6.0),
        ("backward", 6.0, 10.0),
    ]
