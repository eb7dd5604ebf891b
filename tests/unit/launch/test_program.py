"""What is refused before anything is started, and what is said of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dure.cli.app import run_command_line
from dure.errors import UsageError
from dure.launch import JobSpec
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
