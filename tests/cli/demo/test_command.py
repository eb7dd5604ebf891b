"""`dure demo`: what it asks of the launcher, and mistakes of the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.data import digits
from dure.launch import Crash, Exit, JobResult, JobSpec, Line, RankResult

EVENTS = (
    {"facts": {"Steps": 2}},
    {"loss": 2.0, "phases": [0.5] * 6},
    {"loss": 1.0, "phases": [0.5] * 6},
    {"accuracy": 0.75, "memory": 1_000_000},
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """Stand in for the launcher: play two steps and an epoch; collect the jobs."""
    specs: list[JobSpec] = []

    def run_job(spec: JobSpec) -> JobResult:
        specs.append(spec)
        assert spec.on_line is not None
        for event in EVENTS:
            spec.on_line(Line(0, "stdout", json.dumps({"dure demo": event}).encode()))
        spec.on_line(Line(1, "stderr", b"a warning"))
        return JobResult(exit_code=0, ranks=(), elapsed_s=1.0)

    monkeypatch.setattr(command, "run_job", run_job)
    return specs


def demo(*words: object) -> int:
    return run_command_line(["demo", *map(str, words)])


def test_demo_trains_the_same_with_one_rank_and_with_two(
    launched: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--out", tmp_path, "--seed", 5, "--quick") == 0
    assert [spec.nproc for spec in launched] == [1, 2]
    assert launched[0].args == launched[1].args
    assert "--images" in launched[0].args
    shown = capsys.readouterr()
    assert "time to training loss" in shown.out and "gain" in shown.out
    assert "[1] a warning" in shown.err
    assert (tmp_path / "report.html").exists()


def test_ddp_is_compared_with_fsdp(
    launched: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--out", tmp_path, "--fsdp", "--ranks", 3, "--batch-size", 60) == 0
    replicated, sharded = (list(spec.args) for spec in launched)
    assert [spec.nproc for spec in launched] == [3, 3]
    assert "--fsdp" not in replicated
    sharded.remove("--fsdp")
    assert sharded == replicated
    shown = capsys.readouterr().out
    assert "DDP, 3 ranks" in shown and "FSDP, 3 ranks" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--data", "."], "train-images-idx3-ubyte"),
        (["--ranks", 7], "119"),
        (["--fsdp", "--ranks", 1], "--ranks 1"),
        (["--out", "file"], "file"),
        (["no scikit-learn"], "'.[demo]'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    words: list[object],
    named: str,
    launched: list[JobSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"GIF89a")
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"")
    if words == ["no scikit-learn"]:
        missing: Callable[[str], None] = lambda name: None  # noqa: E731
        monkeypatch.setattr(digits, "find_spec", missing)
        words = []
    assert demo(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("dure demo: error: ") and error.count("\n") == 1
    assert named in error
    assert launched == []


@pytest.mark.parametrize(
    ("crash", "code", "first", "last"),
    [
        ("dure.errors.UsageError", 2, "dure demo: error: a message", "a message"),
        (
            "ZeroDivisionError",
            7,
            "[0] Traceback: noise",
            "rank 0 failed: ZeroDivisionError: a message",
        ),
    ],
)
def test_a_mistake_that_a_rank_finds_is_one_line_and_a_crash_shows_the_output(
    crash: str,
    code: int,
    first: str,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_job(spec: JobSpec) -> JobResult:
        assert spec.on_line is not None
        spec.on_line(Line(0, "stderr", b"Traceback: noise"))
        error = Crash(type=crash, message="a message", traceback="")
        failed = RankResult(rank=0, host="here", pid=1, exit=Exit(code=1), crash=error)
        return JobResult(exit_code=7, ranks=(failed,), elapsed_s=1.0, first_failure=failed)

    monkeypatch.setattr(command, "run_job", run_job)
    assert demo("--out", tmp_path) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first
    assert lines[-1].endswith(last)
