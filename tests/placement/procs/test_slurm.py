"""Jobs under a real Slurm of two nodes: ranks started by srun, and a launcher on each node."""

import sys

import pytest

from tests.placement.procs.slurm_cluster import slurm
from tests.waiting import PATIENCE_S, key_file

pytestmark = pytest.mark.needs("Slurm")

MEET = f"""
from datetime import timedelta
from dure.store.rendezvous import rendezvous
joined = rendezvous(timeout=timedelta(seconds={PATIENCE_S}))
print("rank", joined.rank, "of", joined.world_size, flush=True)
joined.close()
"""
TELL = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def key(tmp_path):
    return str(key_file(tmp_path / "key"))


DURE_RUN = (sys.executable, "-m", "dure.cli", "run", "--no-zygote")


def test_ranks_of_srun_find_each_other(cluster, program, key):
    ended = cluster.run("srun", "-N2", "-n3", sys.executable, program(MEET), DURE_JOB_KEY_FILE=key)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"rank {r} of 3" for r in range(3)]


def test_launcher_on_each_node_finds_its_seat(cluster, program, key):
    words = ("srun", "-N2", "--ntasks-per-node=1", *DURE_RUN, "--prefix", "none")
    ended = cluster.run(*words, "--nproc", "2", program(TELL), DURE_JOB_KEY_FILE=key)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["0 4 0", "1 4 0", "2 4 1", "3 4 1"]
    assert "Slurm: host" in ended.err


def test_warning_signal_reaches_the_ranks(cluster, program, key):
    text = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *a: (print('warned', flush=True), os._exit(0)))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    words = ("srun", "-N2", "--ntasks-per-node=1", "--job-name=warned", *DURE_RUN, program(text))
    with cluster.start(*words, DURE_JOB_KEY_FILE=key) as job:
        assert all("ready" in job.stdout.readline() for _ in range(2))
        cluster.run("scancel", "--signal=USR1", "--name=warned")
        out, err = job.communicate(timeout=PATIENCE_S)
    assert out.count("warned") >= 1, err
    assert job.returncode == 0
