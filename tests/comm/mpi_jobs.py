"""Run programs under this machine's mpirun, and see that they end."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dure.comm.backends.mpi import library as mpi_library
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/comm/procs/programs"


@functools.cache
def why_not() -> str:
    """Return why no MPI program can run here, or nothing."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun (Debian: openmpi-bin)"
    if not mpi_library.available():
        return "mpi4py is not installed, or finds no MPI library"
    return ""


@functools.cache
def launcher() -> tuple[str, ...]:
    """Return mpirun with what a test needs: more ranks than cores, and root in a container."""
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    if "Open MPI" not in said.stdout:
        return ("mpirun",)
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return ("mpirun", *root, "--oversubscribe", "--bind-to", "none")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def plain_environment() -> dict[str, str]:
    """Return the environment without what tells a rank who it is; programs may import tests."""
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    named += ("DURE_BACKEND", "DURE_STORE_ADDR", "DURE_LAUNCHER")
    left = {k: v for k, v in os.environ.items() if k not in named}
    left |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), left.get("PYTHONPATH")]))
    return left | {"PYTHONPATH": path}


def run(*command: str, **variables: str) -> Ended:
    """Run a command to its end; end all its processes if it takes too long."""
    with tempfile.TemporaryDirectory(prefix="mpi-") as folder:
        # Open MPI's processes without mpirun fail where two make this folder at the same time.
        host = socket.gethostname().partition(".")[0]
        (Path(folder) / f"ompi.{host}.{os.getuid()}").mkdir()
        return _run(command, {"OMPI_MCA_orte_tmpdir_base": folder} | variables)


def _run(command: tuple[str, ...], variables: dict[str, str]) -> Ended:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=plain_environment() | variables,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {PATIENCE_S} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def mpirun(n: int, program: Path | str, *arguments: str, **variables: str) -> Ended:
    """Run a Python program with `n` ranks."""
    path = PROGRAMS / program if isinstance(program, str) else program
    return run(*launcher(), "-n", str(n), sys.executable, str(path), *arguments, **variables)
