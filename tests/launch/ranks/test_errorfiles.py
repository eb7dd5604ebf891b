"""Where the ranks' error files are, and what the launcher makes of them."""

from pathlib import Path

import pytest

from dure.errorfile import RecordedError, read_error, write_error
from dure.launch.ranks.errorfiles import known_crash, private_directory, temporary_folder
from dure.launch.spec import Crash, Exit

CRASH = Crash(type="ValueError", message="told", traceback="Traceback ...")


def test_crash_is_what_the_rank_told_and_kept_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert known_crash(path, CRASH, Exit(code=1)) == CRASH
    kept = read_error(path)
    assert kept.message == "ValueError: told"
    write_error(path, RecordedError(message="OSError: the program's own", traceback="T"))
    assert known_crash(path, CRASH, Exit(code=1)) == CRASH
    assert read_error(path) is not None
    assert "the program's own" in path.read_text()


def test_crash_of_a_rank_that_told_nothing_is_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error(path, RecordedError(message="OSError: gone", traceback="T"))
    assert known_crash(path, None, Exit(code=0)) is None
    crash = known_crash(path, None, Exit(code=7))
    assert crash == Crash(type="OSError", message="gone", traceback="T", exit_code=7)
    assert known_crash(tmp_path / "none", None, Exit(code=7)) is None


def test_private_directory_lives_as_long_as_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("job"):
        assert private_directory("job").stat().st_mode & 0o777 == 0o700
        (private_directory("job") / "file").write_text("")
    assert list(tmp_path.iterdir()) == []
