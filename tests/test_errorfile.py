"""The file of a rank's error: `dure.record` and torch's, written by one and read by the other."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import record as torchs_record

import dure
from dure.errorfile import RecordedError, read_error, write_error
from dure.errors import LaunchError
from dure.launch.spec import Crash, Exit, RankResult


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def fail() -> None:
    raise ValueError("too: late")


@pytest.mark.parametrize("decorator", [dure.record, torchs_record])
def test_error_is_read_whoever_wrote_it(file: Path, decorator: Callable[..., Any]) -> None:
    before = int(time.time())
    with pytest.raises(ValueError, match="too: late"):
        decorator(fail)()
    error = read_error(file)
    assert (error.message, error.type) == ("ValueError: too: late", "ValueError")
    assert error.traceback.rstrip().endswith("ValueError: too: late")
    assert 'raise ValueError("too: late")' in error.traceback
    assert before <= error.timestamp <= time.time()


def test_torch_reads_what_is_written(file: Path) -> None:
    with pytest.raises(ValueError, match="too: late"):
        dure.record(fail)()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    message: Any = failure.message
    assert message["message"] == "ValueError: too: late"
    assert "in fail" in message["extraInfo"]["py_callstack"]
    assert "in recorded" not in message["extraInfo"]["py_callstack"]


@dure.record
def _double(x: int, *, plus: int) -> int:
    """Say something."""
    return 2 * x + plus


def test_success_leaves_nothing_and_the_function_stays_itself(file: Path) -> None:
    assert _double(2, plus=1) == 5
    assert (_double.__name__, _double.__doc__) == ("_double", "Say something.")
    assert not file.exists()


@pytest.mark.parametrize(("code", "returns"), [(0, True), (3, False), (None, False)])
def test_exit_is_no_error(file: Path, code: int | None, returns: bool) -> None:
    @dure.record
    def leave() -> None:
        sys.exit(code)

    if returns:
        assert leave() is None
    else:
        with pytest.raises(SystemExit) as caught:
            leave()
        assert caught.value.code == code
    assert not file.exists()


@pytest.mark.parametrize("place", [None, "no/such/directory/error.json"])
def test_error_goes_on_where_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if place is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / place))
    with pytest.raises(ValueError, match="too: late"):
        dure.record(fail)()


def test_launchers_error_leaves_the_report_of_the_rank(file: Path) -> None:
    crash = Crash(type="KeyError", message="'x'", traceback="Traceback: there", exit_code=4)
    report = RankResult(rank=3, host="h", pid=1, exit=Exit(code=4), crash=crash)

    @dure.record
    def launch() -> None:
        raise LaunchError("rank 3 failed", report=report)

    with pytest.raises(LaunchError):
        launch()
    error = read_error(file)
    assert (error.type, error.traceback, error.exit_code) == ("KeyError", "Traceback: there", 4)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "{}", '{"message": 3}', '{"message": {"extraInfo": {}}}', "\udcff"),
        "[" * 100_000,
        '{"message": {"message": "x", "errorCode": 1e400}}',
    ],
    ids=range(10),
)
def test_file_that_is_no_error_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert read_error(path) is None
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe"):
        assert read_error(tmp_path / name) is None


def test_short_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text(json.dumps({"message": "out of memory"}))
    assert read_error(path) == RecordedError(message="out of memory")


def test_error_file_is_read_as_text_that_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error(path, RecordedError(message="OSError: \udcff", traceback="\udcff.py"))
    error = read_error(path)
    assert error.message.encode() and error.traceback.encode()
