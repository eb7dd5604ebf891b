"""A real collective over each backend: two processes, started as a user would, with a time limit.

The backends of one kind of launcher share their processes, for importing torch costs more than all
else. MPI has a launcher of its own, which is a job of one program for `dure run`, so that nothing
of it can stay behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any  # Any: what JSON holds

from dure import env
from dure.cli.doctor.checks import RANK_VARIABLES, Findings, fine, problem, warning
from dure.cli.machine import MPI_VARIABLES, QUIET_VARIABLES, find_mpirun

MARK = "DURE-DOCTOR "
_ABSENT = {
    "shm": "Reinstall Dure on Linux with a C++20 compiler: pip install --force-reinstall dure",
    "gloo": "Install a torch that was built with Gloo (the official ones are).",
}


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


def try_backends(
    backends: tuple[str, ...], limit_s: float, flags: Sequence[str] = ("--nproc", "2")
) -> Attempt:
    """Start ranks with `dure run` and these flags, and let them try each backend."""
    rank = ["-m", "dure.cli.doctor.rank", str(limit_s / 2), *backends]
    # A scheduler's variables would make two processes part of a larger job.
    unset = dict.fromkeys((*RANK_VARIABLES, "DURE_STORE_ADDR"))
    process = subprocess.Popen(
        [sys.executable, "-m", "dure.cli", "run", *flags, *rank],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env.child_environment({**QUIET_VARIABLES, **MPI_VARIABLES, **unset}),
        start_new_session=True,
    )
    output, timed_out = "", False
    for end, wait_s in ((process.terminate, limit_s), (process.kill, 3.0), (bool, None)):
        try:
            output, _ = process.communicate(timeout=wait_s)
            break
        except subprocess.TimeoutExpired:
            timed_out = True
            end()
    lines = output.splitlines()
    words = "\n".join(line for line in lines if MARK not in line)[-1000:]
    return Attempt(
        backends=backends,
        told=[json.loads(line.partition(MARK)[2]) for line in lines if MARK in line],
        code=process.returncode,
        timed_out=timed_out,
        words=words.strip() or "nothing was said",
    )


def try_mpi(limit_s: float) -> Findings:
    """Let mpirun start two ranks, where there is an MPI to try."""
    mpirun = find_mpirun(sys.executable)
    if mpirun is None or find_spec("mpi4py") is None:
        yield fine("mpi", "not tried: no mpirun, or no mpi4py (pip install '.[mpi]')")
        return
    flags = ("--no-python", mpirun, "-n", "2", sys.executable)
    yield from judge(try_backends(("mpi",), limit_s, flags))


def judge(attempt: Attempt) -> Findings:
    """Say which backends work; what comes after a silent one was not tried."""
    known = {line["backend"]: line for line in attempt.told if "backend" in line}
    for backend in attempt.backends:
        name, line = f"{backend} collective", known.get(backend)
        if line is None and attempt.timed_out:
            yield warning(
                name,
                f"no answer in time; a busy machine, or a hang: {attempt.words}",
                "Try again on an idle machine, with --limit 60.",
            )
            return
        if line is None:
            yield problem(
                name,
                f"the ranks ended with exit code {attempt.code}: {attempt.words}",
                "The last line says why; try `dure run -n 2` on a small program.",
            )
            return
        if line.get("absent") and backend in _ABSENT:
            yield problem(name, "this backend is not there", _ABSENT[backend])
        elif line.get("absent"):
            yield fine(name, "not tried: this backend is not there")
        elif "error" in line:
            yield problem(
                name,
                f"it fails: {line['error']}",
                "See the findings above: a limit, an address or a library is the usual cause; "
                "docs/errors.md explains the error.",
            )
        else:
            yield fine(name, f"{line['ranks']} ranks, {line['us']:.0f} us for 4 KiB")
        if "copies" in line:
            yield fine("copies", line["copies"])
