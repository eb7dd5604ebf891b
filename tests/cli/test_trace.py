"""`dure trace merge` and `dure trace show`."""

import json

import pytest

from dure.cli.app import USAGE_EXIT_CODE, run_command_line
from tests.trace.made_up import record, write


@pytest.fixture
def folder(tmp_path):
    """Rank 1 called something else under #3, and left before #4; rank 2 left no file."""
    write(tmp_path, 0, [record(0, s) for s in range(1, 5)])
    write(
        tmp_path, 1, [*(record(1, s) for s in (1, 2)), record(1, 3, op="barrier", file="/[x].py")]
    )
    return tmp_path


def test_merge_shows_the_ranks_side_by_side_and_says_what_differs(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "torn.json").write_text("{")
    assert run_command_line(["trace", "merge", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "torn.json" in out and "> 3" in out and "never called" in out and "(no file)" in out
    assert "rank 1 never called all_reduce #4" in out and "[x].py:31" in out


def test_merge_writes_a_timeline(folder, tmp_path, capsys):
    out = tmp_path / "out" / "timeline.json"
    out.parent.mkdir()
    assert run_command_line(["trace", "merge", str(folder), "-o", str(out)]) == 0
    assert json.loads(out.read_text())["traceEvents"]
    capsys.readouterr()
    assert run_command_line(["trace", "merge", str(folder), "-o", "/proc/no/such"]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_merge_prints_json_that_can_be_read(folder, capsys):
    assert run_command_line(["trace", "merge", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["absent"] == [2]
    assert [(d["seq"], d["what"]) for d in found["differences"]] == [(3, ["operation"])]
    assert {(a["rank"], a["missed"]["seq"]) for a in found["absences"]} == {(1, 4), (2, 4)}


def test_show_prints_one_ranks_operations_and_stacks(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command_line(["trace", "show", str(folder / "rank1.json")]) == 0
    out = capsys.readouterr().out
    assert "barrier #3" in out and "MainThread" in out and "train.py:88" in out


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    assert run_command_line(["trace", "merge", str(tmp_path / "x")]) == USAGE_EXIT_CODE
    assert len(capsys.readouterr().err.splitlines()) == 1
