"""MPI over hosts: its own launcher starts the ranks over ssh, and MPI carries the data.

The hosts do not know each other's names; ssh alone does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.mpi_jobs import ROOT, launcher, plain_environment
from tests.comm.namespace_hosts import Host
from tests.hosts.networks import add_second_network
from tests.launch.procs.ssh_hosts import ssh_hosts
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("MPI", "sshd", "engine")]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[list[Host], Path]]:
    with ssh_hosts(2, tmp_path) as made:
        yield made


def start(
    host: Host, config: Path, module: str, folder: Path, **variables: str
) -> tuple[subprocess.Popen[str], Path]:
    """Start a module on two ranks of each host; return mpirun, and the file with all output."""
    key = folder / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DURE_JOB_KEY_FILE": str(key)}
    variables |= {"MASTER_ADDR": host.address, "MASTER_PORT": "29500"}  # of RPC alone
    exports = [word for name in variables for word in ("-x", name)]
    words = ["--mca", "plm_rsh_agent", f"ssh -F {config}", "--host", "a:2,b:2"]
    words += ["--mca", "orte_tmpdir_base", str(folder), "--mca", "btl_tcp_if_include", "eth0"]
    output = folder / "output.txt"
    with output.open("w") as file:
        program = [sys.executable, "-m", module, str(folder)]
        mpirun = host.start_any(
            [*launcher(), *words, *exports, *program], plain_environment() | variables, file
        )
    return mpirun, output


@pytest.mark.parametrize("backend", ["hybrid_mpi", "hybrid", "mpi"])
def test_ranks_compute_what_one_process_computes(
    backend: str, made: tuple[list[Host], Path], tmp_path: Path
):
    (a, _), config = made
    mpirun, output = start(a, config, "tests.hosts.job", tmp_path, DURE_BACKEND=backend)
    code = mpirun.wait(PATIENCE_S)
    for rank in range(4):
        assert f"rank {rank}: right" in output.read_text(), output.read_text()
    assert code == 0, output.read_text()


def test_a_killed_rank_is_named_and_the_store_is_where_the_user_wants_it(
    made: tuple[list[Host], Path], tmp_path: Path
):
    (a, b), config = made
    chosen = {"DURE_STORE_BIND": add_second_network([a, b])[0], "DURE_BACKEND": "hybrid_mpi"}
    mpirun, output = start(a, config, "tests.hosts.reducing", tmp_path, **chosen)
    until(lambda: len(list(tmp_path.glob("up *"))) == 4, lambda: f"ranks\n{output.read_text()}")
    pid = (tmp_path / "up 3").read_text()
    assert b.start_any(["kill", "-KILL", pid], {}).wait() == 0
    assert mpirun.wait(PATIENCE_S) != 0
    printed = output.read_text()
    assert "PeerLost: the process of rank 3 ended" in printed, printed
    assert "process rank 3" in printed and "on node b" in printed, "mpirun's own words"
