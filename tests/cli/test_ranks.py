"""Programs of Dure's own commands: what rank 0 reports is received, and failures are explained."""

import pytest
import typer

from dure.cli import ranks
from dure.errors import LaunchError, UsageError
from dure.launch import Crash, Exit, JobResult, JobSpec, Line, RankResult


def run(monkeypatch, crash: str = "", **result) -> list[dict]:
    """Run two ranks that are played: a report of one, a line of the other, then a crash."""

    def run_job(spec: JobSpec) -> JobResult:
        assert (spec.program, spec.nproc, spec.args) == ("a.module", 2, ("word",))
        assert spec.on_line is not None
        spec.on_line(Line(0, "stdout", b'{"dure": {"loss": 2.0}}'))
        spec.on_line(Line(1, "stderr", b"a warning"))
        if not crash:
            return JobResult(ranks=(), elapsed_s=1.0, **result)
        error = Crash(type=crash, message="a message", traceback="")
        failed = RankResult(rank=0, host="here", pid=1, exit=Exit(code=1), crash=error)
        return JobResult(ranks=(failed,), elapsed_s=1.0, first_failure=failed, exit_code=7)

    monkeypatch.setattr(ranks, "run_job", run_job)
    received: list[dict] = []
    ranks.run_ranks("a.module", ["word"], 2, received.append)
    return received


def test_reports_are_received_and_other_lines_are_shown(monkeypatch, capsys):
    assert run(monkeypatch, exit_code=0) == [{"loss": 2.0}]
    assert capsys.readouterr().err == "[1] a warning\n"


def test_a_mistake_that_a_rank_finds_is_one_and_a_crash_shows_the_output(monkeypatch, capsys):
    with pytest.raises(UsageError, match="a message"):
        run(monkeypatch, crash="dure.errors.UsageError")
    assert capsys.readouterr().err == ""
    with pytest.raises(LaunchError, match=r"rank 0 .*ZeroDivisionError: a message"):
        run(monkeypatch, crash="ZeroDivisionError")
    assert "[1] a warning" in capsys.readouterr().err
    with pytest.raises(typer.Exit) as left:  # interrupted
        run(monkeypatch, exit_code=130)
    assert left.value.exit_code == 130
