"""What a page shows of files, of a run, and of files that no rank has written."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dure.errors import UsageError
from dure.trace.events import State
from dure.trace.merging import read
from dure.viewer import study
from dure.viewer.charts import MOST_POINTS, Charts, Curve
from dure.viewer.sources import Live, Recorded
from dure.viewer.view import Feed, Outcome, RankRow, Site, Wait
from unit.trace.made_up import record, write

MS = 10**6


def phases(rank: int, steps: int, part_ms: tuple[int, int] = (6, 4)) -> list[dict[str, Any]]:
    """Return the spans of steps of 20 ms: forward, backward, and a rest that nobody tells of."""
    found: list[dict[str, Any]] = []
    for i in range(steps):
        at = i * 20 * MS
        for name, ms in zip(("forward", "backward"), part_ms, strict=True):
            found.append(
                {"name": name, "track": "step", "global_rank": rank}
                | {"start_ns": at, "end_ns": at + ms * MS}
            )
            at += ms * MS
    return found


def marks(*points: tuple[int, int, Any]) -> list[dict[str, Any]]:
    return [{"step": s, "time_ns": ms * MS, "scalars": values} for s, ms, values in points]


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
    assert shown is not None
    assert shown.length_ms == 20.0
    assert [(name, start, end) for name, _, start, end in shown.rows[1].bars] == [
        ("forward", 0.0, 6.0),
        ("backward", 6.0, 10.0),
    ]


def test_timeline_is_of_the_pipeline_that_the_group_had_last(tmp_path: Path) -> None:
    def action(text: str, ms: int) -> dict[str, Any]:
        details = {"action": text, "rank": 0, "step": 1}
        span = {"name": text, "track": "stage 0", "global_rank": 0, "group": "world"}
        return span | {"start_ns": ms * MS, "end_ns": (ms + 2) * MS, "details": details}

    first = [action("0F0", 0), action("0B0", 2)]
    second = [action("0F0", 10), action("0I0", 13), action("0W0", 15)]
    write(tmp_path, 0, [], {"spans": first + second})
    shown = study.timeline(read(tmp_path))
    assert shown is not None
    assert shown.rows[0].bars == [("0F0", "F", 0, 2), ("0I0", "I", 3, 5), ("0W0", "W", 5, 7)]


def test_curves_count_each_mark_once_and_divide_by_steps(tmp_path: Path) -> None:
    charts = Charts()
    write(tmp_path, 0, [], {"marks": marks((0, 0, {"loss": 2.0}), (1, 30, {"loss": None}))})
    charts.take(read(tmp_path))
    more = marks((1, 30, {"loss": None}), (3, 70, {"loss": 1.0}))
    write(tmp_path, 0, [], {"marks": more})
    charts.take(read(tmp_path))
    assert charts.curves["step", "", 0].ys == [30.0, 20.0]  # 40 ms for two steps
    loss = charts.curves["scalar", "loss", 0]
    assert (loss.xs, loss.ys) == ([0, 1, 3], [2.0, None, 1.0])


def test_parts_are_means_over_ranks_and_have_a_rest(tmp_path: Path) -> None:
    charts = Charts(slot_s=1.0)
    write(tmp_path, 0, [], {"spans": phases(0, 4)})
    write(tmp_path, 1, [], {"spans": phases(1, 4, (8, 8))})
    charts.take(read(tmp_path))
    charts.finish()
    parts = {name: curve.ys for (kind, name, _), curve in charts.curves.items() if kind == "part"}
    assert parts == {"forward": [7.0], "backward": [6.0], "other": [7.0]}
    assert charts.curves["step", "", 0].ys == [20.0, 20.0, 20.0]


def test_long_curve_halves_and_says_so() -> None:
    curve = Curve()
    for i in range(MOST_POINTS + 1):
        curve.add(i, float(i))
    assert (curve.generation, curve.xs[:3], len(curve.xs)) == (1, [0, 2, 4], MOST_POINTS // 2 + 1)


def test_curve_goes_back_with_a_program_that_starts_again() -> None:
    curve = Curve()
    for step in (1, 2, 3, 2):
        curve.add(step, step / 10)
    assert (curve.xs, curve.ys, curve.generation) == ([1, 2], [0.1, 0.2], 1)


def test_run_shows_the_launchers_rows_with_what_ranks_publish(tmp_path: Path) -> None:
    page = Live("train.py", tmp_path)
    rows = [RankRow(rank=rank, pid=rank + 100, step=1) for rank in range(3)]
    page.feed(Feed(elapsed_s=1.0, ranks=rows, lines=[(1, "stdout", "hello"), (1, "stderr", "x")]))
    page.look()  # before anybody has published
    late = record(0, 2, end_ns=0, state=State.STARTED, start_ns=9 * 10**9)
    points = marks((5, 10, {"loss": 0.5}))
    write(tmp_path, 0, [record(0, 1), late], {"pid": 100, "marks": points})
    write(tmp_path, 1, [record(1, 1)], {"pid": 101})
    write(tmp_path, 2, [record(2, 1)], {"pid": 7})  # of a process that was replaced
    version = page.version
    page.look()
    assert page.version > version
    first, second, third = page.view.ranks
    assert (first.step, first.values, first.where) == (
        5,
        {"loss": 0.5},
        "/home/me/train.py:88 in load",
    )
    assert (second.step, third.where) == (1, "")
    call = "all_reduce #2 (float32, 400 bytes, SUM)"
    assert page.view.waits == [
        Wait(rank=0, on=[1, 2], call=call, at="/home/me/train.py:31", since_s=1.0)
    ]
    assert [text for _, _, text in page.output.since(1, 0)] == ["hello", "x"]
    assert page.output.since(1, 1) == [(2, "stderr", "x")]
    assert page.view.failure is None


def test_first_failure_tells_what_ranks_said_rather_than_published(tmp_path: Path) -> None:
    page = Live("train.py", tmp_path)
    for rank in range(3):
        write(tmp_path, rank, [record(rank, 1)], {"pid": rank})
    told = Site(ranks=[0], call="all_reduce #2", at="a.py:2", how="still in it")
    outcome = Outcome(ok=False, text="ended", headline="rank 2 failed first", first=2, sites=[told])
    rows = [RankRow(rank=rank, pid=rank, state="failed") for rank in range(3)]
    page.feed(Feed(elapsed_s=1.0, ranks=rows, outcome=outcome))
    page.end()
    failure = page.view.failure
    assert failure is not None and page.over
    assert failure.headline == "rank 2 failed first"
    assert [s.ranks for s in failure.sites] == [[2, 1], [0]]  # the first to fail comes first
    assert failure.sites[1] == told


def test_recorded_run_says_who_called_what_where(tmp_path: Path) -> None:
    for rank in (0, 1):
        op = "broadcast" if rank else "all_reduce"
        last = record(rank, 2, op, line=40 + rank, state=State.FAILED, error="Desync")
        write(tmp_path, rank, [record(rank, 1), last])
    view = Recorded([tmp_path]).view
    assert view.failure is not None
    assert [(s.ranks, s.at) for s in view.failure.sites] == [
        ([0], "/home/me/train.py:40"),
        ([1], "/home/me/train.py:41"),
    ]
    assert "differ in the operation of #2" in view.failure.sentences[0]
    assert [row.state for row in view.ranks] == ["failed", "failed"]


def test_nothing_to_show_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError):
        Recorded([tmp_path])
    with pytest.raises(UsageError):
        Recorded([tmp_path / "missing.json"])


def mutated(value: Any, dice: random.Random) -> Any:
    """Return a value with some of what is in it replaced."""
    if dice.random() < 0.02:
        odd = [None, -1, 0, 1 << 40, 1 << 200, -1e300, "", "x" * 1000, [], {}, True, "1F0", -5]
        return dice.choice(odd)
    if isinstance(value, dict):
        return {key: mutated(each, dice) for key, each in value.items()}
    if isinstance(value, list):
        kept = [mutated(each, dice) for each in value if dice.random() > 0.02]
        return kept * dice.choice([1, 1, 1, 3])
    return value


@pytest.mark.parametrize("seed", range(40))
def test_files_that_make_no_sense_show_what_they_can(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    pipeline = [
        {"name": "0F0", "track": "stage 0", "global_rank": 0, "start_ns": 5, "end_ns": 9}
        | {"group": "world", "details": {"action": f"0F{i}", "rank": 0, "step": 1}}
        for i in range(3)
    ]
    for rank in range(3):
        records = [record(rank, seq) for seq in range(1, 6)]
        records += [record(rank, 1, "recv", peer=1), record(rank, 6, end_ns=0, state=State.STARTED)]
        points = marks(*((i, i, {"loss": 1.0}) for i in range(3)))
        path = write(
            tmp_path, rank, records, {"spans": phases(rank, 3) + pipeline, "marks": points}
        )
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), dice)))
    try:
        shown = Recorded([tmp_path])
    except UsageError:
        return
    assert json.loads(msgspec.json.encode(shown.view))["live"] is False


def test_progress_alone_gives_step_times(tmp_path: Path) -> None:
    page = Live("train.py", tmp_path)
    for at_s, step, pid in ((1.0, 10, 7), (2.0, 10, 7), (3.0, 14, 7), (4.0, 2, 8), (5.0, 4, 8)):
        page.feed(Feed(elapsed_s=at_s, ranks=[RankRow(rank=0, pid=pid, step=step)]))
    curve = page.charts.curves["step", "", 0]
    assert (curve.xs, curve.ys) == ([3.0, 5.0], [500.0, 500.0])  # 2 s for 4 steps, 1 s for 2


def test_chart_library_is_whole_and_has_its_licence() -> None:
    static = files("dure.viewer") / "static"
    script = (static / "uPlot.iife.min.js").read_text()
    assert script.startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    assert "innerHTML" not in script
    assert "Leon Sorokin" in (static / "LICENSE.uPlot").read_text()
    for name in ("page.js", "drawing.js", "open.js"):
        assert "innerHTML" not in (static / name).read_text()
