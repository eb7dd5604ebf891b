"""The environment of a rank, the reserved port, and the checks before a start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dure import env
from dure.errors import UsageError
from dure.launch.environment import JobAddress, default_threads, rank_log_dir, rank_variables
from dure.launch.ports import reserve_port
from dure.launch.program import check_program
from dure.launch.spec import JobSpec

ADDRESS = JobAddress(name="j", master_port=5, store="h:6", key_fd=7, key_file="/k")


def test_users_variables_have_the_last_word() -> None:
    spec = JobSpec(program="p", nproc=2, env={"RANK": None, "MASTER_PORT": "9", "MINE": "x"})
    variables = rank_variables(spec, 1, ADDRESS, threads=3)
    assert variables["RANK"] is None
    assert (variables["MASTER_PORT"], variables["MINE"]) == ("9", "x")
    assert (variables["LOCAL_RANK"], variables["OMP_NUM_THREADS"]) == ("1", "3")


def test_error_file_is_in_the_log_directory_or_nowhere(tmp_path: Path) -> None:
    assert rank_variables(JobSpec(program="p"), 0, ADDRESS, None)["TORCHELASTIC_ERROR_FILE"] is None
    spec = JobSpec(program="p", log_dir=tmp_path)
    file = rank_variables(spec, 0, ADDRESS, None)["TORCHELASTIC_ERROR_FILE"]
    assert file == str(rank_log_dir(tmp_path, 0) / "error.json")


def test_every_dure_variable_is_declared() -> None:
    variables = rank_variables(JobSpec(program="p"), 0, ADDRESS, None)
    assert {name for name in variables if name.startswith("DURE_")} <= set(env.VARIABLES)


@pytest.mark.parametrize(
    ("cores", "nproc", "threads"), [(8, 2, 4), (2, 2, 1), (2, 8, 1), (7, 2, 3)]
)
def test_threads_share_the_cores(cores: int, nproc: int, threads: int) -> None:
    assert default_threads(cores, nproc) == threads


def test_reserved_port_can_be_taken_by_a_server_with_reuse_only() -> None:
    keeper, port = reserve_port()
    with keeper:
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", ""):
            socket.create_server((address, port)).close()


def test_reserved_port_is_given_to_nobody_else() -> None:
    keepers = [reserve_port() for _ in range(20)]
    assert len({port for _, port in keepers}) == 20
    for keeper, _ in keepers:
        keeper.close()


@pytest.mark.parametrize("name", ["json.tool", "unittest", "pytest"])
def test_module_that_can_run_passes(name: str) -> None:
    check_program(JobSpec(program=name, kind="module"))


@pytest.mark.parametrize("name", ["", ".", "json.", "no_such_module_at_all", "json.x", "json"])
def test_module_that_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_program(JobSpec(program=name, kind="module"))


def test_module_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "boom"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tool.py").write_text("")
    monkeypatch.chdir(tmp_path)
    check_program(JobSpec(program="boom.tool", kind="module"))
    with pytest.raises(UsageError):
        check_program(JobSpec(program="boom.other", kind="module"))


@pytest.mark.parametrize(("nproc", "grace_s"), [(0, None), (-3, None), (1, -1.0)])
def test_impossible_numbers_are_refused(nproc: int, grace_s: float | None) -> None:
    with pytest.raises(UsageError):
        check_program(JobSpec(program=__file__, nproc=nproc, grace_s=grace_s))
