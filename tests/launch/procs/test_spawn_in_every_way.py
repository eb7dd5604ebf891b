"""A program written for torch.distributed runs, its import changed, under torchrun and by itself.

The program is programs/for_torch.py. A test makes a copy of it in which one line differs, and
expects that both ranks get to their last line. `dure run` and the ways to give an address have
tests of their own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launch.procs.launching import Launching

PROGRAM = Path(__file__).parent / "programs" / "for_torch.py"
IMPORT = "import torch.distributed as dist\n"
DONE = [f"rank {rank} of 2: done" for rank in range(2)]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def program(job: Launching) -> str:
    """The program with its one import changed."""
    text = PROGRAM.read_text()
    assert text.count(IMPORT) == 1
    return job.write(text.replace(IMPORT, "import dure as dist\n"))


def ended(job: Launching, *words: str) -> list[str]:
    done = job.finish(job.start_any(sys.executable, *words))
    assert done.code == 0, done.err
    return sorted(re.findall(r"rank \d of \d: done", done.out))  # lines of two ranks may mix


def test_under_torchrun(job: Launching, program: str) -> None:
    assert ended(job, *TORCHRUN, program, "env") == DONE


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_from_within_by_multiprocessing(
    job: Launching, program: str, method: str, port: int
) -> None:
    assert ended(job, program, method, str(port), "2") == DONE


@pytest.mark.slow
def test_the_program_is_right_it_runs_on_torch_itself(job: Launching, port: int) -> None:
    assert ended(job, str(PROGRAM), "fork", str(port), "2") == DONE
