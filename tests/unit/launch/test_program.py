"""What is refused before anything is started, and what is said of it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli.app import run_command_line
from dure.errors import UsageError
from dure.launch import JobSpec, job
from dure.launch.program import check_program
from dure.launch.ranks.zygote import INTERRUPTED, Zygote, usable


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "hi.py"
    path.write_text("print('hi')")
    return str(path)


def test_a_python_file_behind_no_python_is_told_so(script: str) -> None:
    with pytest.raises(UsageError, match="executable") as caught:
        check_program(JobSpec(program=script, kind="executable"))
    assert "--no-python" in caught.value.fix


def test_a_file_in_a_closed_directory_is_not_said_to_be_missing(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", closed)
        with pytest.raises(UsageError, match="cannot be read"):
            check_program(JobSpec(program=script))


@pytest.mark.parametrize(("nnodes", "seen"), [((0, 0), "--nnodes 0"), ((2, 1), "--nnodes 2:1")])
def test_numbers_of_hosts_are_shown_as_they_were_given(
    script: str, nnodes: tuple[int, int], seen: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_program(JobSpec(program=script, nnodes=nnodes))
    assert caught.value.seen == seen


def test_a_program_without_a_command_is_told_how_to_start(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line([script]) == 2
    assert f"dure run {script}" in capsys.readouterr().err


@pytest.mark.parametrize(("trouble", "lines"), [("torch is missing", 1), (None, 0)])
def test_of_a_zygote_only_trouble_is_told_and_an_interrupt_is_none(
    monkeypatch: pytest.MonkeyPatch, trouble: str | None, lines: int
) -> None:
    zygote = Zygote.__new__(Zygote)
    why = trouble or INTERRUPTED
    monkeypatch.setattr(Zygote, "trouble", lambda self, fd: why)  # pyright: ignore
    said: list[str] = []
    assert usable(zygote, -1, said.append) is None
    assert len(said) == lines


def test_options_that_say_how_code_runs_are_handed_on_and_no_others() -> None:
    told = "from dure.launch.interpreter import interpreter_options as o; print(*o())"
    options = ["-BOO", "-s", "-q", "-X", "utf8=1", "-Wignore::UserWarning"]
    plain = {name: word for name, word in os.environ.items() if not name.startswith("PYTHON")}
    words = [sys.executable, *options, "-c", told]
    done = subprocess.run(words, env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-B", "-O", "-O", "-X", "utf8=1", "-W", "ignore::UserWarning"]


def test_key_lies_in_a_file_without_a_name() -> None:
    with job._secret_memory("dure-key") as fd:
        info = os.fstat(fd)
        assert (stat.S_IMODE(info.st_mode), info.st_nlink) == (0o600, 0)
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError):
        os.fstat(fd)
