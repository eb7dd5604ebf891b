"""`dure plan`: schedules beside each other, a grid and a picture of the chosen one; memory."""

from __future__ import annotations

import pytest

from dure.cli.app import run_command_line
from dure.schedules import read_csv


def called(capsys, *words):
    code = run_command_line(["plan", "pipeline", *words])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_all_schedules_are_compared_and_the_chosen_one_is_marked(capsys, tmp_path):
    files = ["--csv", str(tmp_path / "a.csv"), "--svg", str(tmp_path / "a.svg")]
    words = ["--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]
    code, out, _ = called(capsys, *words, *files)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "* 1f1b 4 33 27.3% 4" in lines  # (8 + 3) * 3, of which 24 are work
    assert "interleaved-1f1b 8 28.5 15.8% 5.5" in lines
    assert "rank 0 F0 F1 F2 F3" in out.replace("   ", " ")
    assert len(read_csv(tmp_path / "a.csv").ranks) == 4
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "* a 4 33 27.3% 4" in " ".join(
        called(capsys, "--schedule", str(tmp_path / "a.csv"))[1].split()
    )


def test_times_may_be_given(capsys):
    words = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "1", "--times", "F=2,B=5"]
    assert "* 1f1b 2 14 50.0% 1" in " ".join(called(capsys, *words)[1].split())
    assert "* 1f1b 2 16 56.2% 1" in " ".join(called(capsys, *words, "--send", "1")[1].split())


def test_each_stage_may_have_a_time(capsys):
    """Two layers, 1 and 3: a stage each, or halves of them in four stages."""
    words = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--times", "F=1/3,B=0"]
    lines = [" ".join(line.split()) for line in called(capsys, *words)[1].splitlines()]
    assert "* 1f1b 2 7 42.9% 2" in lines  # 1, then twice 3
    # 1F1 ends at 1.5 on rank 1; 2F0 at 1 + 1.5, 2F1 at 4 on rank 0; 3F0 at 4, 3F1 at 5.5
    assert "looped-bfs 4 5.5 27.3% 2" in lines
    code, _, err = called(capsys, *words[:-1], "F=1/2/3")
    assert code == 2 and "one for each of 2 stages" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "1f1b", "--stages", "4"],
        ["--schedule", "nothing", "--stages", "4", "--microbatches", "4"],
        ["--stages", "4", "--microbatches", "4", "--times", "F=1,B"],
        ["--stages", "4", "--microbatches", "4", "--times", "F=-1"],
        ["--stages", "4", "--microbatches", "4", "--ranks", "3"],
    ],
)
def test_what_is_wrong_is_one_line(words, capsys):
    code, out, err = called(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dure plan: error: ")


def test_memory_of_each_rank_is_counted(capsys):
    words = ["--params", "8e9", "--mesh", "pp=4,fsdp=2,tp=2", "--microbatches", "8"]
    assert run_command_line(["plan", "memory", *words]) == 0
    out = capsys.readouterr().out
    assert "8,030,261,248 parameters: 32 layers of width 4096, 16 ranks" in out
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[:4]] for row in rows] == [
        ["0", "0-7", "2.11", "2.11"],
        ["1", "8-15", "1.63", "1.63"],
        ["2", "16-23", "1.63", "1.63"],
        ["3", "24-31", "2.11", "2.11"],
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --params, or --model with its sizes"),
        (["--params", "8e9", "--mesh", "pq=2"], "'pq=2'"),
        (["--model", "width=64"], "a model has a width and layers"),
        (["--params", "8e9", "--mesh", "tp=16"], "tp divides the heads of keys: 8"),
        (["--params", "8e9", "--optimizer", "lion"], "One of adamw, sgd, momentum"),
    ],
)
def test_memory_tells_what_does_not_fit(capsys, words, said):
    assert run_command_line(["plan", "memory", *words]) != 0
    assert said in capsys.readouterr().err
