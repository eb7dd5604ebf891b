"""The mpi backend under this machine's mpirun: the contract, and what can happen to a job."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.comm import mpi_jobs
from tests.comm.conformance import suite
from tests.comm.procs.programs import mpi_cases

pytestmark = pytest.mark.needs("MPI")


def write(folder: Path, text: str) -> Path:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    return program


SUBJECTS = {**suite.SUBJECTS, "mpi_cases": mpi_cases}


def check_all_ran(ended: mpi_jobs.Ended, n: int) -> None:
    assert ended.code == 0, ended.err
    ran = json.loads(ended.out)
    assert ran == {name: suite.cases_of(module, n) for name, module in SUBJECTS.items()}


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_mpi_backend_keeps_the_contract(n):
    check_all_ran(mpi_jobs.mpirun(n, "mpi_suite.py", *SUBJECTS), n)


def test_program_without_a_launcher_is_a_world_of_one_that_keeps_the_contract():
    program = mpi_jobs.PROGRAMS / "mpi_suite.py"
    check_all_ran(mpi_jobs.run(sys.executable, str(program), *SUBJECTS), 1)


def test_ranks_that_mpi_did_not_start_are_told_so(tmp_path):
    program = write(
        tmp_path,
        """
        import os
        import dure as dist

        # Open MPI starts a daemon for each rank, which removes a folder that another one uses.
        os.environ["OMPI_MCA_orte_tmpdir_base"] += "/" + os.environ["RANK"]
        os.mkdir(os.environ["OMPI_MCA_orte_tmpdir_base"])
        try:
            dist.init_process_group("mpi")
        except dist.UsageError as error:
            print("mpirun -n 2" in error.fix)
        """,
    )
    dure_run = (sys.executable, "-m", "dure.cli", "run", "--no-fold", "--nproc", "2")
    ended = mpi_jobs.run(*dure_run, str(program))
    assert ended.code == 0, ended.err
    assert ended.out.count("True") == 2, ended.out


# What can happen to a job, one after another in one job: what each rank says begins with a word of
# the test that reads it.
JOB = """
import datetime
import time
import dure as dist
import torch
from dure.comm.backends.mpi import backend

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="")

start = backend.create_mpi

def late(options):
    if options.rank == 1:
        time.sleep(0.5)  # rank 0 is in MPI_Init
        options.store.set("late", "yes")
    return start(options)

backend.create_mpi = late
with dist.process_group("mpi"):
    say("late", dist.get_backend())
backend.create_mpi = start

for name in ("mpi", None, "gloo", "mpi"):
    with dist.process_group(name):
        t = torch.ones(2, dtype=torch.bfloat16)
        dist.all_reduce(t, async_op=True).wait()
        say("group", dist.get_rank(), int(t[0].item()), dist.get_backend())

from mpi4py import MPI

if MPI.COMM_WORLD.Get_rank() == 1:
    MPI.COMM_WORLD.recv(source=0)
else:
    try:
        dist.init_process_group("mpi", timeout=datetime.timedelta(seconds=1))
    except dist.RendezvousTimeout as error:
        say("missing", *error.missing)
    MPI.COMM_WORLD.send(None, dest=1)

dist.init_process_group("mpi")
dist.barrier()
if dist.get_rank() == 1:
    raise RuntimeError("on purpose")
dist.all_reduce(torch.ones(1))  # raises PeerLost
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> mpi_jobs.Ended:
    """`JOB` on two ranks, with MPI's own way of the fewest threads and no variable of ours."""
    program = write(tmp_path_factory.mktemp("mpi"), JOB)
    return mpi_jobs.mpirun(2, program, MPI4PY_RC_THREAD_LEVEL="funneled")


def said(job: mpi_jobs.Ended, word: str) -> list[str]:
    """Return the rest of all lines that begin with a word, sorted."""
    pairs = (line.partition(" ") for line in job.out.splitlines())
    return sorted(rest for first, _, rest in pairs if first == word)


def test_a_rank_that_starts_mpi_late_still_reaches_the_store_in_rank_0(job):
    """Rank 0 waits for it within MPI, and serves the store meanwhile."""
    assert said(job, "late") == ["mpi", "mpi"], job.err


def test_program_meets_without_any_variable_2_ranks(job):
    """With a backend named or not, and a second time."""
    named = ["gloo", "mpi", "mpi", "shm"]
    assert said(job, "group") == [f"{r} 2 {b}" for r in (0, 1) for b in named], job.err


def test_rank_that_does_not_come_is_named_2_ranks(job):
    assert said(job, "missing") == ["1"], job.err


def test_rank_that_raises_ends_the_job_2_ranks(job):
    """It leaves the group on its way out, so the other raises, and both end."""
    assert job.code != 0
    assert "on purpose" in job.err
