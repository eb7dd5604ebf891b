"""What a page shows of files, of a run, and of files that no rank has written."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dure.errors import UsageError
from dure.trace.events import State
from dure.viewer.sources import Live, Recorded
from dure.viewer.view import Feed, RankRow, RankWait
from tests.trace.made_up import record, write
from tests.viewer.made_steps import marks, phases


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
        RankWait(rank=0, on=[1, 2], call=call, at="/home/me/train.py:31", since_s=1.0)
    ]
    assert [text for _, _, text in page.output.since(1, 0)] == ["hello", "x"]
    assert page.output.since(1, 1) == [(2, "stderr", "x")]
    assert page.view.failure is None


def test_recorded_run_says_who_called_what_where(tmp_path: Path) -> None:
    for rank in (0, 1):
        op = "broadcast" if rank else "all_reduce"
        last = record(rank, 2, op, line=40 + rank, state=State.FAILED, error="Desync")
        write(tmp_path, rank, [record(rank, 1), last])
    view = Recorded([tmp_path]).view
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
    with pytest.raises(UsageError, match=str(tmp_path / "missing.json")):
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
