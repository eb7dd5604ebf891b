"""Jobs under a real Slurm of two nodes: ranks started by srun, and a launcher on each node."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.placement.procs.slurm_cluster import slurm
from tests.waiting import PATIENCE_S, key_file, until

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


SHAPES = [
    pytest.param(("-N1", "-n3"), marks=pytest.mark.slow),
    ("-N2", "-n3"),
    pytest.param(("-N2", "-n4", "--mpi=pmi2"), marks=pytest.mark.slow),
]
DURE_RUN = (sys.executable, "-m", "dure.cli", "run", "--no-zygote")


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_of_srun_find_each_other(cluster, program, key, shape):
    ended = cluster.run("srun", *shape, sys.executable, program(MEET), DURE_JOB_KEY_FILE=key)
    count = int(shape[1][2:])
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"rank {r} of {count}" for r in range(count)]


def test_launcher_on_each_node_finds_its_seat(cluster, program, key):
    words = ("srun", "-N2", "--ntasks-per-node=1", *DURE_RUN, "--prefix", "none")
    ended = cluster.run(*words, "--nproc", "2", program(TELL), DURE_JOB_KEY_FILE=key)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["0 4 0", "1 4 0", "2 4 1", "3 4 1"]
    assert "Slurm: host" in ended.err


def test_launcher_on_each_rank_is_refused(cluster, program):
    ended = cluster.run("srun", "-N1", "-n2", *DURE_RUN, "--nproc", "2", program(TELL))
    assert ended.code == 2
    assert "--ntasks-per-node=1" in ended.err


def test_shell_of_a_batch_script_is_no_rank(cluster, tmp_path):
    script = tmp_path / "job.sh"
    out = tmp_path / "out"
    script.write_text(f"#!/bin/sh\n{sys.executable} -m dure.cli env --json\n")
    cluster.run("sbatch", "-N2", "-o", out, script)
    until(lambda: out.exists() and out.read_text().endswith("}\n"), "the batch script")
    found = json.loads(out.read_text())["found"]
    assert (found["system"], found["member"], found["hosts"]) == ("Slurm", None, ["n1", "n2"])


def test_warning_signal_reaches_the_ranks(cluster, program, key):
    text = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *a: (print('warned', flush=True), os._exit(0)))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    words = ("srun", "-N2", "--ntasks-per-node=1", "--job-name=warned", *DURE_RUN, program(text))
    with cluster.start(*words, DURE_JOB_KEY_FILE=key) as job:
        assert job.stdout is not None
        assert all("ready" in job.stdout.readline() for _ in range(2))
        cluster.run("scancel", "--signal=USR1", "--name=warned")
        out, err = job.communicate(timeout=PATIENCE_S)
    assert out.count("warned") >= 1, err
    assert job.returncode == 0


STEPS = """
import contextlib, os, pathlib, signal, time
folder = pathlib.Path(os.environ["FOLDER"])
rank, run = os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
saved = folder / "checkpoint"
first = int(saved.read_text()) if saved.exists() else 0
(folder / f"run {run} rank {rank} from {first}").touch()
if run == "0":
    while len(list(folder.glob("run 0 *"))) < 2:
        time.sleep(0.01)
    if rank == "0":
        saved.write_text("7")
    lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    port = f":{int(os.environ['DURE_STORE_ADDR'].rpartition(':')[2]):04X}"
    store = {f"socket:[{w[9]}]" for w in lines if w[1].endswith(port) and w[3] == "0A"}
    held = set()
    for fd in pathlib.Path(f"/proc/{os.getppid()}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(fd))
    while rank == "0" and not saved.exists():
        time.sleep(0.01)
    if store & held:
        os.kill(os.getppid(), signal.SIGKILL)  # the launcher that coordinates
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_job_whose_coordinator_was_killed_is_requeued_and_goes_on(
    cluster, program, key, tmp_path
):
    script, out, folder = tmp_path / "job.sh", tmp_path / "out", tmp_path / "said"
    folder.mkdir()
    words = (*DURE_RUN, "--nproc", "1", program(STEPS))
    script.write_text(
        f"#!/bin/sh\nsrun --ntasks-per-node=1 {' '.join(words)} && exit 0\n"
        '[ -z "$SLURM_RESTART_COUNT" ] && scontrol requeue $SLURM_JOB_ID\nsleep 60\n'
    )
    submit = ("sbatch", "--parsable", "-N2", "--requeue", "--open-mode=append", "-o", out, script)
    job = cluster.run(*submit, DURE_JOB_KEY_FILE=key, FOLDER=str(folder)).out.strip()
    requeued_at = float("inf")

    def goes_on() -> bool:
        nonlocal requeued_at
        lost = out.exists() and "coordinator was lost" in out.read_text()
        if lost and "PENDING" in cluster.run("squeue", "-h", "-j", job, "-o", "%T").out:
            requeued_at = min(requeued_at, time.monotonic())
        # Slurm waits 2 minutes. Not less than a second: a node takes no job in the second in which
        # it was told to kill it ("job credential revoked"), and then Slurm gives the job up.
        if time.monotonic() > requeued_at + 2:
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return len(list(folder.glob("run 1 * from 7"))) == 2

    until(goes_on, lambda: f"a requeued job: {sorted(folder.iterdir())}\n{out.read_text()}")
    assert "the job's coordinator was lost" in out.read_text()
