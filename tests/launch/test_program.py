"""What is refused before anything is started, and what is said of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
        ("script", "missing.py", "no such file"),
        ("script", "boom", "no such file"),
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


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "known"), [("boom.x", True), ("json", True), ("no_such", False)])
def test_modules_to_preload_are_looked_up_beside_the_program(name: str, known: bool) -> None:
    spec = JobSpec(program="hi.py", preload=("json", name))
    if known:
        check_program(spec)
        return
    with pytest.raises(UsageError, match=r"no such module.*--preload no_such"):
        check_program(spec)


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


@pytest.mark.parametrize(
    ("field", "flag"), [("log_dir", "--log-dir"), ("trace_dir", "--trace-dir")]
)
def test_a_file_in_place_of_a_directory_is_named_with_its_flag(
    field: str, flag: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=flag) as caught:
        check_program(replace(JobSpec(program=__file__), **{field: file}))
    assert str(file) in caught.value.seen


def test_log_directory_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UsageError, match=f"every user may write .*{tmp_path}"):
        check_program(JobSpec(program=__file__, log_dir=tmp_path))
    check_program(JobSpec(program=__file__, log_dir=tmp_path / "mine"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("gpus", [False, True])
def test_bindings_near_gpus_are_refused_on_a_host_without(
    gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "may_have_gpus", lambda: gpus)
    check_program(JobSpec(program="hi.py", numa="node"))
    spec = JobSpec(program="hi.py", numa="socket")
    if gpus:
        check_program(spec)
        return
    with pytest.raises(UsageError, match="need a GPU for each rank"):
        check_program(spec)
