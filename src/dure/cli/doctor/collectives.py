"""A real collective over each backend: two processes, started as a user would, with a time limit.

The backends of one kind of launcher share their processes, for importing torch costs more than all
else. MPI has a launcher of its own, which is a job of one program for `dure run`, so that nothing
of it can stay behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, cast  # Any: what JSON holds

from dure import env
from dure.cli.doctor.finding import Finding, fine, problem, warning

__all__ = ["Attempt", "judge", "try_backends", "try_hosts", "try_mpi"]

_MARK = "DURE-DOCTOR "
_ABSENT = {
    "shm": "Reinstall Dure on Linux with a C++20 compiler: pip install --force-reinstall dure",
    "gloo": "Install a torch that was built with Gloo (the official ones are).",
}
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# A scheduler's variables would make two processes part of a larger job.
_STRANGE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DURE_STORE_ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of trying some backends.

    `told` are the lines of rank 0 (see `dure.cli.doctor.rank`), `words` the last lines that the
    processes wrote, `timed_out` whether they had to be ended.
    """

    backends: tuple[str, ...]
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    code: int = 0
    timed_out: bool = False
    words: str = ""

    @property
    def torch(self) -> dict[str, Any]:
        """What torch says of GPUs; empty where no rank came that far."""
        return next((line for line in self.told if "torch" in line), {})


def try_backends(backends: tuple[str, ...], limit_s: float) -> Attempt:
    """Start two ranks with `dure run`, and let them try each backend."""
    rank = ["-m", "dure.cli.doctor.rank", str(limit_s / 2), *backends]
    return _run(["--nproc", "2", *rank], backends, limit_s)


def try_mpi(limit_s: float) -> Attempt | None:
    """Let mpirun start two ranks; None where there is no MPI to try."""
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if mpirun is None or find_spec("mpi4py") is None:
        return None
    rank = ["-m", "dure.cli.doctor.rank", str(limit_s / 2), "mpi"]
    arguments = ["--no-python", mpirun, "-n", "2", sys.executable, *rank]
    return _run(arguments, ("mpi",), limit_s)


def try_hosts(hosts: str, limit_s: float, options: tuple[str, ...] = ()) -> Attempt:
    """Start one rank on each of several hosts, and let them try what goes between hosts."""
    rank = ["-m", "dure.cli.doctor.rank", str(limit_s / 2), "gloo"]
    reach = ["--hosts", hosts, *(f"--ssh-option={option}" for option in options)]
    return _run([*reach, "--nproc", "1", *rank], ("gloo",), limit_s)


def _run(arguments: list[str], backends: tuple[str, ...], limit_s: float) -> Attempt:
    changes: dict[str, str | None] = {**_QUIET, **_MPI, **dict.fromkeys(_STRANGE)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dure.cli", "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env.child_environment(changes),
        start_new_session=True,
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.terminate()
        output = _last_output(process)
    return Attempt(
        backends=backends,
        told=_told(output),
        code=process.returncode,
        timed_out=timed_out,
        words="\n".join(line for line in output.splitlines() if _MARK not in line)[-1000:],
    )


def _last_output(process: subprocess.Popen[str]) -> str:
    """Return what an ended launcher had said; it gets a moment to clean up."""
    try:
        return process.communicate(timeout=3.0)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _told(output: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in output.splitlines():
        _, mark, text = line.partition(_MARK)
        if mark:
            with contextlib.suppress(ValueError):
                content: object = json.loads(text)
                if isinstance(content, dict):
                    found.append(cast("dict[str, Any]", content))
    return found


def judge(attempt: Attempt | None) -> list[Finding]:
    """Say which backends work."""
    if attempt is None:
        return [fine("mpi", "not tried: no mpirun, or no mpi4py (pip install '.[mpi]')")]
    known = {line["backend"]: line for line in attempt.told if "backend" in line}
    found: list[Finding] = []
    for backend in attempt.backends:
        line = known.get(backend)
        if line is None:
            found.append(_silent(backend, attempt))
            break  # what comes after it was not tried
        found.append(_judge_one(backend, line))
        if "copies" in line:
            found.append(fine("copies", line["copies"]))
    return found


def _judge_one(backend: str, line: dict[str, Any]) -> Finding:
    name = f"{backend} collective"
    if line.get("absent"):
        if backend in _ABSENT:
            return problem(name, "this backend is not there", _ABSENT[backend])
        return fine(name, "not tried: this backend is not there")
    if "error" in line:
        return problem(
            name,
            f"it fails: {line['error']}",
            "See the findings above: a limit, an address or a library is the usual cause; "
            "docs/errors.md explains the error.",
        )
    return fine(name, f"{line['ranks']} ranks, {line['us']:.0f} us for 4 KiB")


def _silent(backend: str, attempt: Attempt) -> Finding:
    name = f"{backend} collective"
    words = attempt.words.strip() or "nothing was said"
    if attempt.timed_out:
        return warning(
            name,
            f"no answer in time; a busy machine, or a hang: {words}",
            "Try again on an idle machine, with --limit 60.",
        )
    seen = f"the ranks ended with exit code {attempt.code}: {words}"
    return problem(name, seen, "The last line says why; try `dure run -n 2` on a small program.")
