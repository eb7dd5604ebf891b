"""MPI over hosts: its own launcher starts the ranks over ssh, and MPI carries the data.

The hosts do not know each other's names; ssh alone does.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.mpi_jobs import ROOT, launcher, plain_environment
from tests.comm.namespace_hosts import Host
from tests.launch.procs.ssh_hosts import ssh_hosts
from tests.waiting import PATIENCE_S, key_file

pytestmark = [pytest.mark.slow, pytest.mark.needs("MPI", "sshd", "engine")]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[list[Host], Path]]:
    with ssh_hosts(2, tmp_path) as made:
        yield made


@pytest.mark.parametrize("backend", ["hybrid_mpi", "hybrid", "mpi"])
def test_ranks_compute_what_one_process_computes(
    backend: str, made: tuple[list[Host], Path], tmp_path: Path
):
    (a, _), config = made
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DURE_BACKEND": backend}
    variables["DURE_JOB_KEY_FILE"] = str(key_file(tmp_path / "key"))
    variables |= {"MASTER_ADDR": a.address, "MASTER_PORT": "29500"}  # of RPC alone
    exports = [word for name in variables for word in ("-x", name)]
    words = ["--mca", "plm_rsh_agent", f"ssh -F {config}", "--host", "a:2,b:2"]
    words += ["--mca", "orte_tmpdir_base", str(tmp_path), "--mca", "btl_tcp_if_include", "eth0"]
    program = [sys.executable, "-m", "tests.hosts.job", str(tmp_path)]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        started = [*launcher(), *words, *exports, *program]
        code = a.start_any(started, plain_environment() | variables, file).wait(PATIENCE_S)
    for rank in range(4):
        assert f"rank {rank}: right" in output.read_text(), output.read_text()
    assert code == 0, output.read_text()
