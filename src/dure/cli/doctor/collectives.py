"""A real collective over each backend: processes started by `dure run`, with a time limit.

Backends with the same launcher share their processes, because importing torch takes longest. For
MPI `dure run` starts one program, mpirun, so that its processes cannot stay behind either.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any  # Any: what JSON holds

from dure import env
from dure.cli.doctor.checks import RANK_VARIABLES, Findings, fine, problem, warning
from dure.cli.machine import MPI_VARIABLES, QUIET_VARIABLES, find_mpirun

MARK = "DURE-DOCTOR "
_END_S = 3.0
_ABSENT = {
    "shm": "Reinstall Dure on Linux with a C++20 compiler: pip install --force-reinstall dure",
    "gloo": "Install a torch that was built with Gloo (the official ones are).",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of trying some backends.

    Attributes:
        backends: In the order in which they were tried.
        lines: Of rank 0 (see `dure.cli.doctor.rank`).
        code: The exit code.
        timed_out: Whether the processes had to be ended.
        words: The last lines that they wrote.
    """

    backends: tuple[str, ...]
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    code: int = 0
    timed_out: bool = False
    words: str = ""

    @property
    def torch(self) -> dict[str, Any]:
        """What torch reports of GPUs; empty if no rank came that far."""
        return next((line for line in self.lines if "torch" in line), {})


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
    timed_out = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.terminate()
        try:
            output, _ = process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    lines = output.splitlines()
    words = "\n".join(line for line in lines if MARK not in line)[-1000:]
    return Attempt(
        backends=backends,
        lines=[json.loads(line.partition(MARK)[2]) for line in lines if MARK in line],
        code=process.returncode,
        timed_out=timed_out,
        words=words.strip() or "no output",
    )


def try_mpi(limit_s: float) -> Findings:
    """Let mpirun start two ranks, if an MPI is installed."""
    mpirun = find_mpirun(sys.executable)
    if mpirun is None or find_spec("mpi4py") is None:
        yield fine("mpi", "not tried: no mpirun, or no mpi4py (pip install '.[mpi]')")
        return
    flags = ("--no-python", mpirun, "-n", "2", sys.executable)
    yield from judge(try_backends(("mpi",), limit_s, flags))


def try_hosts(flags: Sequence[str], limit_s: float) -> Findings:
    """Let one rank on each of several hosts do a collective together."""
    attempt = try_backends(("gloo",), limit_s, flags)
    for finding in judge(attempt):
        yield replace(finding, check="hosts")


def judge(attempt: Attempt) -> Findings:
    """Judge which backends work; those after one without an answer were not tried."""
    known = {line["backend"]: line for line in attempt.lines if "backend" in line}
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
                "See the last line; try `dure run -n 2` on a small program.",
            )
            return
        if line.get("absent") and backend in _ABSENT:
            reason = f": {line['reason']}" if line.get("reason") else ""
            yield problem(name, f"this backend is not available{reason}", _ABSENT[backend])
        elif line.get("absent"):
            yield fine(name, "not tried: this backend is not available")
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
