"""`dure demo`: what is asked of the launcher, and what the user is told when it cannot be done."""

from typing import NamedTuple

import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.cli.demo.events import EpochEnd, Step, encode
from dure.data import digits
from dure.launch import Crash, Exit, JobResult, Line, RankResult
from tests.cli.demo.demo_sample import START, phases


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def dure_demo(capsys):
    """Call `dure demo ARGUMENTS` as the command line does."""

    def call(*arguments):
        exit_code = run_command_line(["demo", *map(str, arguments)])
        return Outcome(exit_code, *capsys.readouterr())

    return call


@pytest.fixture
def launched(monkeypatch):
    """Stand in for the launcher: play two steps and an epoch on every rank; collect the specs."""
    specs = []

    def run_job(spec):
        specs.append(spec)
        for rank in range(spec.nproc):
            for event in (
                START,
                Step(step=1, loss=2.0, phases=phases(0.5)),
                Step(step=2, loss=1.0, phases=phases(0.5)),
                EpochEnd(epoch=1, accuracy=0.75),
            ):
                spec.on_line(Line(rank, "stdout", encode(event).encode()))
            spec.on_line(Line(rank, "stderr", b"a warning"))
        return JobResult(exit_code=0, ranks=(), elapsed_s=1.0)

    monkeypatch.setattr(command, "run_job", run_job)
    return specs


def test_demo_runs_one_rank_and_then_two_alike(dure_demo, launched, tmp_path):
    result = dure_demo("--out", tmp_path, "--seed", 5, "--quick")
    assert result.exit_code == 0, result.stderr
    assert [spec.nproc for spec in launched] == [1, 2]
    assert launched[0].args == launched[1].args
    assert launched[0].args[-1] == "--events" and "--images" in launched[0].args
    assert "time to training loss" in result.stdout and "gain" in result.stdout
    assert "[1] a warning" in result.stderr
    assert (tmp_path / "report.html").exists()


def test_ddp_is_compared_with_fsdp(dure_demo, launched, tmp_path):
    result = dure_demo("--out", tmp_path, "--fsdp", "--ranks", 3, "--batch-size", 60)
    assert result.exit_code == 0, result.stderr
    replicated, sharded = (list(spec.args) for spec in launched)
    assert [spec.nproc for spec in launched] == [3, 3]
    assert "--fsdp" not in replicated
    sharded.remove("--fsdp")
    assert sharded == replicated
    assert "DDP, 3 ranks" in result.stdout and "FSDP, 3 ranks" in result.stdout
    page = (tmp_path / "report.html").read_text()
    assert "dure demo --epochs 6 --batch-size 60 --backend shm --seed 0 --ranks 3" in page
    assert " --fsdp" in page


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
def test_mistakes_are_one_line_and_code_2(dure_demo, launched, tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"GIF89a")
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"")
    if words == ["no scikit-learn"]:
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
        words = []
    _assert_one_line(dure_demo(*words), named)
    assert launched == []


def _assert_one_line(result, named):
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("dure demo: error: ")
    assert named in result.stderr


@pytest.mark.parametrize("crash", ["dure.errors.UsageError", "ZeroDivisionError"])
def test_rank_that_blames_the_user_is_one_line_and_one_that_crashes_shows_its_output(
    dure_demo, monkeypatch, tmp_path, crash
):
    def run_job(spec):
        spec.on_line(Line(0, "stderr", b"Traceback: noise"))
        told = Crash(type=crash, message="a message", traceback="")
        failed = RankResult(rank=0, host="here", pid=1, exit=Exit(code=1), crash=told)
        return JobResult(exit_code=7, ranks=(failed,), elapsed_s=1.0, first_failure=failed)

    monkeypatch.setattr(command, "run_job", run_job)
    result = dure_demo("--out", tmp_path)
    if crash == "ZeroDivisionError":
        assert result.exit_code == 7
        assert "[0] Traceback: noise" in result.stderr
        assert "rank 0 failed: ZeroDivisionError: a message" in result.stderr
    else:
        _assert_one_line(result, "a message")
