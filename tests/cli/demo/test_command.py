"""`dure demo`: what it asks of the ranks, and mistakes of the user."""

import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.data import digits


@pytest.fixture
def started(monkeypatch):
    """Play two steps and an epoch; collect the numbers of ranks and their words."""
    jobs = []

    def run_ranks(module, args, ranks, on_report):
        jobs.append((ranks, args))
        on_report({"facts": {"Steps": 2}})
        for loss in (2.0, 1.0):
            on_report({"loss": loss, "phases": [0.5] * 6})
        on_report({"accuracy": 0.75})

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    return jobs


def demo(*words) -> int:
    return run_command_line(["demo", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--data", "."], "train-images-idx3-ubyte"),
        (["--ranks", 7], "119"),
        (["--out", "file"], "file"),
        (["no scikit-learn"], "'.[demo]'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(words, named, started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"GIF89a")
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"")
    if words == ["no scikit-learn"]:
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
        words = []
    assert demo(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("dure demo: error: ") and error.count("\n") == 1
    assert named in error
    assert started == []


def test_a_report_that_cannot_be_written_is_one_line(started, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    assert demo("--out", tmp_path) == 2
    assert f"{tmp_path / 'report.html'} cannot be written" in capsys.readouterr().err
