"""What the launcher tells a page, and what is said where the server is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dure.cli import page
from dure.cli.app import run_command_line
from dure.launch.spec import Crash, Exit, Frame, JobResult, RankResult


@pytest.mark.parametrize("words", [["view", "x"], ["run", "--page", "x.py"]])
def test_missing_server_is_one_line_with_what_to_install(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    assert run_command_line(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].endswith("Install them: pip install 'dure[page]'")


def test_nothing_to_view_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["view", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def rank(number: int, **more: object) -> RankResult:
    fields = {"rank": number, "host": "here", "pid": 7, "exit": Exit(signal=15)} | more
    return RankResult(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            "all_reduce #41 (float32, 40 bytes, SUM) of group 'world' at /a b/t.py:12, still in it",
            ("all_reduce #41 (float32, 40 bytes, SUM)", "/a b/t.py:12", "still in it"),
        ),
        (
            "barrier #2 of group 'x, at y' at t.py:3, failed with PeerLost 0.0165 s earlier",
            ("barrier #2", "t.py:3", "failed with PeerLost"),
        ),
        (
            "barrier #2 of group 'world', ended 1e-05 s earlier",
            ("barrier #2", "", "ended"),
        ),
        ("none", ("none", "", "")),
    ],
)
def test_last_operation_is_read_as_ranks_tell_it(last: str, expected: tuple[str, ...]) -> None:
    stack = (Frame("/t.py", 9, "load"),)
    result = JobResult(
        exit_code=1,
        elapsed_s=2.0,
        ranks=(rank(0, last=last, stack=stack), rank(1)),
        first_failure=rank(1, exit=Exit(signal=9)),
    )
    outcome = page.outcome_of(result)
    (site,) = outcome.sites
    assert (site.ranks, site.call, site.at, site.how) == ([0], *expected)
    assert site.where == ("/t.py:9 in load" if expected[2] == "ended" else "")
    assert (outcome.first, outcome.ok, outcome.text) == (
        1,
        False,
        "ended with exit code 1 after 2.0 s",
    )
    assert "killed by SIGKILL" in outcome.headline


def test_outcome_has_the_first_traceback() -> None:
    crash = Crash(type="ValueError", message="x", traceback="Traceback ...\nValueError: x\n")
    failed = rank(0, exit=Exit(code=1), crash=crash)
    result = JobResult(exit_code=1, elapsed_s=1.0, ranks=(failed,), first_failure=failed)
    assert page.outcome_of(result).traceback == crash.traceback
    good = page.outcome_of(JobResult(exit_code=0, elapsed_s=1.0, ranks=()))
    assert (good.ok, good.text, good.headline) == (True, "succeeded after 1.0 s", "")
