"""Dure under the name "gloo": by a variable, a flag and a call, in ranks of several launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dure.torch_backend
from dure.errors import UsageError, UsageWarning
from tests.torch_backend.torch_worlds import in_pool, world
from tests.waiting import PATIENCE_S, free_port

PROGRAM = str(Path(__file__).with_name("standing_in_program.py"))
FILE = "{folder}/store"
KEPT = "[dure] cpu:gloo,cuda:torch_gloo keeps torch's gloo: Dure replaces gloo alone"
LINE = "[dure] Dure replaces gloo: 2 ranks over shm (DURE_STAND_IN_QUIET=1 hides this line)"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}"]
DURE_RUN = ["-m", "dure.run", "--nproc=2", "--prefix=none"]


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    port = str(free_port())
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return subprocess.run(
        [sys.executable, *(word.format(port=port, folder=folder) for word in words)],
        env={**os.environ, **job, **variables},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    ("words", "variable"),
    [
        pytest.param([*TORCHRUN, PROGRAM, FILE, "here"], "gloo", id="torchrun"),
        pytest.param([*DURE_RUN, "--stand-in-gloo", PROGRAM, FILE, "here"], "", id="dure run"),
        pytest.param([*DURE_RUN, PROGRAM, FILE, "here", "stand_in"], "", id="call in a rank"),
        pytest.param([PROGRAM, FILE, "spawn"], "gloo", id="spawn"),
        pytest.param([PROGRAM, FILE, "spawn", "stand_in"], "", id="spawn after the call"),
        pytest.param([PROGRAM, FILE, "fork", "stand_in"], "", id="fork after the call"),
    ],
)
def test_groups_of_gloo_are_those_of_dure(words: list[str], variable: str, tmp_path: Path) -> None:
    done = run(words, tmp_path, DURE_STAND_IN=variable)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]
    assert [done.stderr.splitlines().count(line) for line in (LINE, KEPT)] == [1, 1]


def test_the_line_is_not_printed_if_it_is_switched_off(tmp_path: Path) -> None:
    variables = {"DURE_STAND_IN": "gloo", "DURE_STAND_IN_QUIET": "1"}
    done = run([*DURE_RUN, PROGRAM, FILE, "here"], tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert "Dure" not in done.stderr


ALONE = """
import torch.distributed as dist
print(dist.is_available())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"DURE_STAND_IN": "nccl"}, "Dure can replace no backend but gloo: 'nccl'"),
        ({"DURE_STAND_IN": "gloo", "DURE_STAND_IN_QUIET": "perhaps"}, "DURE_STAND_IN_QUIET"),
    ],
)
def test_a_wrong_variable_is_an_error_of_the_first_group(
    variables: dict[str, str], seen: str, tmp_path: Path
) -> None:
    done = run(["-c", ALONE], tmp_path, **variables)
    assert done.returncode == 1
    assert done.stdout == "True\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dure.errors.UsageError: ")
    assert seen in last


@pytest.mark.parametrize("name", ["nccl", "dure", "", None])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no backend but gloo"):
        dure.torch_backend.stand_in(name)


def ignite(rank: int, folder: str) -> None:
    sys.modules["ignite.distributed"] = types.ModuleType("ignite.distributed")
    try:
        with pytest.warns(UsageWarning, match="auto_model"), world(rank, folder):
            pass
    finally:
        del sys.modules["ignite.distributed"]


test_a_program_of_ignite_is_warned = in_pool(ignite)
