"""Ranks of an MPI launcher that find each other by its variables, without MPI itself."""

from __future__ import annotations

import re

import pytest

from tests.comm.mpi_jobs import mpirun

pytestmark = pytest.mark.needs("MPI")

MEET = """
import sys
from datetime import timedelta
from dure.store.rendezvous import rendezvous
joined = rendezvous(timeout=timedelta(seconds=240))
print(f"rank {joined.rank} of {joined.world_size}", flush=True)
joined.close()
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
