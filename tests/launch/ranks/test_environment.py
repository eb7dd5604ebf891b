"""What a rank finds in its environment."""

from pathlib import Path
from typing import Any

import pytest

from dure import env
from dure.errors import UsageError
from dure.launch.ranks.environment import JobAddress, Round, rank_variables
from dure.launch.ranks.errorfiles import private_directory
from dure.launch.spec import JobSpec

ADDRESS = JobAddress(name="j", key_fd=7, key_file="/k")


def one_host(nproc: int = 1) -> Round:
    return Round.of(hosts=("h",), nprocs=(nproc,), master_addr="h", master_port=5, store="h:6")


def variables(
    local_rank: int = 0, round: Round | None = None, **fields: Any
) -> dict[str, str | None]:
    spec = JobSpec(program="p", **fields)
    return rank_variables(spec, local_rank, ADDRESS, round or one_host(spec.nproc), 3)


def test_users_variables_have_the_last_word_and_every_dure_variable_is_declared() -> None:
    mine = variables(1, nproc=2, env={"RANK": None, "MASTER_PORT": "9", "MINE": "x"})
    assert mine["RANK"] is None
    assert (mine["MASTER_PORT"], mine["MINE"]) == ("9", "x")
    assert (mine["LOCAL_RANK"], mine["OMP_NUM_THREADS"]) == ("1", "3")
    assert {name for name in mine if name.startswith("DURE_")} <= set(env.VARIABLES)


def test_ranks_may_move_between_cores_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert variables()["DURE_CORE_MIGRATION"] == "1"
    monkeypatch.setenv("DURE_CORE_MIGRATION", "0")
    assert variables()["DURE_CORE_MIGRATION"] == "0"


KEEPS = {"MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "33554432"}


@pytest.mark.parametrize(
    ("spec", "environment", "expected"),
    [
        ({}, {}, KEEPS),
        ({}, {"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off"}, KEEPS),
        ({"malloc_defaults": True}, {}, {}),
        ({}, {"MALLOC_TRIM_THRESHOLD_": "1"}, {}),
        ({}, {"MALLOC_TOP_PAD_": ""}, {}),
        ({}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, {}),
        ({"env": {"MALLOC_MMAP_THRESHOLD_": "5"}}, {}, {"MALLOC_MMAP_THRESHOLD_": "5"}),
        ({"env": {"MALLOC_MMAP_THRESHOLD_": None}}, {}, {"MALLOC_MMAP_THRESHOLD_": None}),
        ({"env": {"GLIBC_TUNABLES": None}}, {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, KEEPS),
    ],
)
def test_ranks_keep_freed_memory_unless_the_user_has_chosen_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    environment: dict[str, str],
    expected: dict[str, str | None],
) -> None:
    for name in (*KEEPS, "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert {n: v for n, v in variables(**spec).items() if n in KEEPS} == expected


def test_error_file_is_in_the_log_directory_or_a_private_one(tmp_path: Path) -> None:
    private = Path(str(variables()["TORCHELASTIC_ERROR_FILE"]))
    assert private.parent == private_directory("j")
    kept = variables(log_dir=tmp_path)["TORCHELASTIC_ERROR_FILE"]
    assert kept == str(tmp_path / "attempt_0/rank_0/error.json")


def test_ranks_are_numbered_host_by_host_and_told_of_their_job() -> None:
    third = Round.of(
        number=2,
        node=1,
        hosts=("a", "b", "c"),
        nprocs=(2, 3, 1),
        master_addr="a",
        master_port=5,
        store="c:6",
    )
    job = {"max_restarts": 4, "run_id": "me", "role": "trainer", "elastic": True, "min_ranks": 2}
    expected = {
        "RANK": "4",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "4",
        "ROLE_WORLD_SIZE": "6",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_RUN_ID": "me",
        "DURE_STORE_ADDR": "c:6",
        "DURE_ELASTIC": "1",
        "DURE_ELASTIC_MIN": "2",
    }
    told = variables(2, third, nproc=3, **job)
    assert {name: told[name] for name in expected} == expected
    assert variables()["DURE_ELASTIC"] is None


@pytest.mark.parametrize(("visible", "gpus"), [(None, ["0", "1"]), ("3, GPU-ab", ["3", "GPU-ab"])])
def test_virtual_local_rank_sees_one_gpu(
    visible: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ranks = [variables(rank, nproc=2, virtual_local_rank=True) for rank in (0, 1)]
    assert [x["CUDA_VISIBLE_DEVICES"] for x in ranks] == gpus
    assert [(x["RANK"], x["LOCAL_RANK"]) for x in ranks] == [("0", "0"), ("1", "0")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError):
        variables(1, nproc=2, virtual_local_rank=True)
