"""What the launcher tells a page, and what is said where the server is missing."""

import importlib.util
import os
import time

import pytest

from dure.cli import page
from dure.cli.app import run_command_line
from dure.launch.ranks.report import ReportedStep
from dure.launch.spec import Crash, Exit, JobResult, RankResult, StackFrame


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
    assert told[0].endswith("Install them: pip install '.[page]' in the checkout of Dure.")


def test_rows_have_state_step_and_last_line() -> None:
    ranks = page.RankTable()
    for number in (0, 1, 2, 1):  # the last in the place of the second
        ranks.noted({"event": "started", "rank": number, "pid": os.getpid(), "host": "h"})
    ranks.progressed(0, ReportedStep(step=30, total=60, values={"loss": 0.25}))
    ranks.spoke(0, b"\x1b[31mepoch 2\x1b[0m")
    ranks.noted({"event": "crashed", "rank": 1, "type": "ValueError", "message": "my bug"})
    ranks.noted({"event": "ended", "rank": 2, "code": 0, "signal": None})
    ranks.spoke(2, b"too late")
    ranks.measure(time.monotonic())
    first, second, third = ranks.rows.values()
    assert (first.step, first.total, first.values) == (30, 60, {"loss": 0.25})
    assert (first.state, first.last, first.pid) == ("running", "epoch 2", os.getpid())
    assert first.memory is not None and first.quiet_s is not None
    assert (second.state, second.last) == ("failed", "ValueError: my bug")
    assert (third.state, third.last, third.memory) == ("ended", "", None)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"10%\r20%\r", "20%"),
        (b"\x1b[2K\x1b[1mbold\x1b[0m", "bold"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\xff\x00tab\there", "\ufffd tab here"),
    ],
)
def test_line_is_shown_without_control_characters(line: bytes, text: str) -> None:
    assert page.shown(line) == text


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
        ("barrier #2 of group 'world', ended 1e-05 s earlier", ("barrier #2", "", "ended")),
        ("none", ("none", "", "")),
    ],
)
def test_last_operation_is_read_as_ranks_tell_it(last: str, expected: tuple[str, ...]) -> None:
    stack = (StackFrame("/t.py", 9, "load"),)
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
    assert (outcome.first, outcome.ok) == (1, False)
    assert "killed by SIGKILL" in outcome.headline


def test_outcome_has_the_first_traceback() -> None:
    crash = Crash(type="ValueError", message="x", traceback="Traceback ...\nValueError: x\n")
    failed = rank(0, exit=Exit(code=1), crash=crash)
    result = JobResult(exit_code=1, elapsed_s=1.0, ranks=(failed,), first_failure=failed)
    assert page.outcome_of(result).traceback == crash.traceback
