"""A program written for torch.distributed runs, its import changed, in whatever way it is started.

The program is programs/for_torch.py. A test makes a copy of it in which one line differs, starts it
in one of the field's ways, and expects that both ranks get to their last line. Where the way of
starting is not the launcher's own business, a rank is forked from a process that has torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.testing.pool import start_server
from tests.launch.procs.launching import DURE, Launching
from tests.waiting import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs" / "for_torch.py"
IMPORT = "import torch.distributed as dist\n"
DONE = [f"rank {rank} of 2: done" for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def program(folder: Path) -> str:
    """The program with its one import changed."""
    text = PROGRAM.read_text()
    assert text.count(IMPORT) == 1
    path = folder / "for_dure.py"
    path.write_text(text.replace(IMPORT, "import dure as dist\n"))
    return str(path)


LAUNCHERS = {
    "dure run": (*DURE, "run", "--nproc", "2", "--prefix", "none"),
    "torchrun": (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ),
}


@pytest.fixture(scope="module")
def outputs(folder: Path, program: str) -> Iterator[dict[str, str]]:
    """What the program prints under each launcher; all of them run at once."""
    job = Launching(folder)
    for words in LAUNCHERS.values():
        job.start_any(*words, program, "env")
    finished = job.finish_all(*job.started)
    yield {
        name: done.out + done.err * (done.code != 0)
        for name, done in zip(LAUNCHERS, finished, strict=True)
    }
    job.kill()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_a_launcher(outputs: dict[str, str], launcher: str) -> None:
    assert sorted(outputs[launcher].splitlines()) == DONE


def _be_rank(words: list[str], variables: dict[str, str], output: Path) -> None:
    os.environ.update(variables)
    sys.argv[:] = words
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path(words[0], run_name="__main__")


def forked(*programs: list[str], folder: Path, **variables: str) -> list[str]:
    """Run programs in processes that are forked where torch is loaded; return what they print."""
    context = start_server()
    outputs = [folder / f"out-{number}" for number in range(len(programs))]
    processes = [
        context.Process(
            target=_be_rank,
            args=(words, {"XDG_CONFIG_HOME": str(folder), "RANK": f"{number}"} | variables, out),
        )
        for number, (words, out) in enumerate(zip(programs, outputs, strict=True))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return sorted(line for out in outputs for line in out.read_text().splitlines())


def test_by_hand_with_four_variables(program: str, tmp_path: Path, port: int) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert forked([program, "env"], [program, "env"], folder=tmp_path, **world) == DONE


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_by_url(program: str, tmp_path: Path, port: int, way: str) -> None:
    url = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting"}[way]
    ranks = [[program, url, str(rank), "2", "gloo"] for rank in range(2)]
    assert forked(*ranks, folder=tmp_path) == DONE


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_from_within_by_multiprocessing(
    program: str, tmp_path: Path, method: str, port: int
) -> None:
    assert forked([program, method, str(port), "2"], folder=tmp_path) == DONE


@pytest.mark.slow
def test_the_program_is_right_it_runs_on_torch_itself(tmp_path: Path, port: int) -> None:
    assert forked([str(PROGRAM), "fork", str(port), "2"], folder=tmp_path) == DONE
