"""Ranks of an MPI launcher that find each other by its variables, without MPI itself."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from procs.mpi_jobs import mpirun, run

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no mpirun (Debian: openmpi-bin)"
)

MEET = """
import sys
from datetime import timedelta
from dure.store.rendezvous import rendezvous
meeting = rendezvous(timeout=timedelta(seconds=30))
print(f"rank {meeting.rank} of {meeting.world_size}", flush=True)
meeting.close()
assert "mpi4py" not in sys.modules
"""


def met(out):
    """Return what the ranks said; mpirun mixes their lines, and the ends of them."""
    return sorted(re.findall(r"rank \d of \d", out))


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(MEET)
    return path


def test_ranks_of_mpirun_meet_by_its_variables(program):
    ended = mpirun(3, program)
    assert ended.code == 0, ended.err
    assert met(ended.out) == [f"rank {r} of 3" for r in range(3)]


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_line_of_a_dry_run_runs(program, launcher):
    words = [sys.executable, "-m", "dure.cli", "run", "--nproc", "2", "--dry-run", str(program)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    head = "mpirun" if launcher == "mpirun" else sys.executable
    line = next(line for line in shown.splitlines() if line.startswith(head))
    # More ranks than cores, and root, are what a container's mpirun must be told of.
    free = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    free |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    ended = run(*shlex.split(line), **free)
    assert met(ended.out) == ["rank 0 of 2", "rank 1 of 2"], ended.err
