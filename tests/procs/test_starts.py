"""A program written for torch.distributed runs, its import changed, in whatever way it is started.

The program is programs/for_torch.py. A test makes a copy of it in which one line differs, starts it
in one of the field's ways, and expects that both ranks get to their last line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "for_torch.py"
IMPORT = "import torch.distributed as dist\n"
LIMIT_S = 150


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The program with its one import changed."""
    text = PROGRAM.read_text()
    assert text.count(IMPORT) == 1
    path = tmp_path / "for_dure.py"
    path.write_text(text.replace(IMPORT, "import dure as dist\n"))
    return str(path)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a command; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **environment: str) -> subprocess.Popen[str]:
        keys = {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | keys,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(*processes: subprocess.Popen[str]) -> str:
    """Wait for the ranks; return what they printed, after a check that both came to the end."""
    output = "".join(process.communicate(timeout=LIMIT_S)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * len(processes), output
    for rank in range(2):
        assert f"rank {rank} of 2: done" in output, output
    return output


def test_under_dure_run_2_ranks(program: str, start: Start) -> None:
    finish(start("-m", "dure.cli", "run", "--nproc", "2", program, "env"))


def test_under_torchrun_2_ranks(program: str, start: Start) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finish(start(*torchrun, program, "env"))


def test_by_hand_with_four_variables_2_ranks(program: str, start: Start, port: int) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    finish(*(start(program, "env", RANK=str(r), **shared) for r in range(2)))


@pytest.mark.slow
def test_by_tcp_2_ranks(program: str, start: Start, port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    finish(*(start(program, url, str(r), "2") for r in range(2)))


def test_by_file_2_ranks(program: str, start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    finish(*(start(program, url, str(r), "2", "gloo") for r in range(2)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_from_within_by_multiprocessing_2_ranks(
    program: str, start: Start, method: str, port: int
) -> None:
    finish(start(program, method, str(port), "2"))


@pytest.mark.slow
def test_the_program_is_right_it_runs_on_torch_itself_2_ranks(start: Start, port: int) -> None:
    finish(start(str(PROGRAM), "fork", str(port), "2"))
