"""What is refused before anything is started, and what is said of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dure.cli.app import run_command_line
from dure.errors import UsageError
from dure.launch import program
from dure.launch.program import check_program
from dure.launch.spec import JobSpec, Kind, Std


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program, and a package that must not be imported."""
    (tmp_path / "hi.py").write_text("print('hi')")
    (tmp_path / "boom").mkdir()
    (tmp_path / "boom/__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("kind", "program", "refused"),
    [
        *(("module", name, "") for name in ("json.tool", "pytest", "boom.tool")),
        *(("module", name, "no such module") for name in ("", ".", "no_such_module_at_all")),
        ("script", "hi.py", ""),
        ("script", "/bin/true", "not a Python file"),
        ("executable", "/bin/true", ""),
        ("executable", "./hi.py", "not executable"),
    ],
)
def test_program_is_looked_up_before_anything_starts(
    kind: Kind, program: str, refused: str
) -> None:
    spec = JobSpec(program=program, kind=kind)
    if not refused:
        check_program(spec)
        return
    with pytest.raises(UsageError) as caught:
        check_program(spec)
    assert refused in caught.value.what


def test_a_file_in_a_closed_directory_is_not_said_to_be_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", closed)
        with pytest.raises(UsageError, match="cannot be read"):
            check_program(JobSpec(program=str(folder / "hi.py")))


def test_a_directory_that_is_gone_is_told_before_anything_starts(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")  # the fixture goes back
    (folder / "gone").rmdir()
    with pytest.raises(UsageError):
        check_program(JobSpec(program="json.tool", kind="module"))


def test_a_program_without_a_command_is_told_how_to_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line([str(folder / "hi.py")]) == 2
    assert f"dure run {folder / 'hi.py'}" in capsys.readouterr().err


IMPOSSIBLE: list[dict[str, Any]] = [
    {"nproc": 0},
    {"nproc": -3},
    {"grace_s": -1.0},
    {"hang_timeout_s": 0.0},
    {"nnodes": (0, 1)},
    {"nnodes": (3, 2)},
    {"nnodes": (2, 2)},  # and no endpoint
    {"nnodes": (2, 2), "endpoint": "h:1", "node_rank": 2},
    {"endpoint": "no-port"},
    {"endpoint": "h:70000"},
    {"master_port": 0},
    {"max_restarts": -1},
    {"join_timeout_s": 0.0},
    {"last_call_s": -1.0},
    {"elastic": True, "min_ranks": 0},
    {"elastic": True, "nproc": 2, "min_ranks": 3},
    {"local_ranks_filter": frozenset({2}), "nproc": 2},
    {"tee": {2: Std.OUT}, "nproc": 2},
    {"redirects": {-1: Std.ERR}, "nproc": 2},
]


@pytest.mark.parametrize("fields", IMPOSSIBLE, ids=str)
def test_impossible_numbers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check_program(JobSpec(program=__file__, **fields))


def test_possible_numbers_pass() -> None:
    check_program(
        JobSpec(
            program=__file__,
            nproc=2,
            nnodes=(1, 4),
            endpoint="[::1]:29400",
            node_rank=3,
            elastic=True,
            min_ranks=8,
            tee={0: Std.OUT},
        )
    )


@pytest.mark.usefixtures("folder")
def test_nothing_is_started_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(program="hi.py", nproc=1)
    check_program(spec)
    monkeypatch.setattr(program, "_PROC", "/nowhere")
    with pytest.raises(UsageError, match="/proc is not mounted"):
        check_program(spec)
