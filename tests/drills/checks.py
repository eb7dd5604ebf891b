"""What must be true of a job of a drill once it has ended."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from drills import foretold
from drills.jobs import Job, Odd
from drills.plans import SAMPLES

_SHARED = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Return the names of shared memory that may be Dure's."""
    return {name for name in os.listdir(_SHARED) if "dure" in name}


def check(job: Job, shared_before: set[str]) -> None:
    """Check everything.

    Raises:
        Odd: The first thing that is not as it must be.
    """
    _check_exit_codes(job)
    _check_nothing_is_left(job, shared_before)
    if job.plan.kind == "rounds":
        _check_commits(job)
    elif job.plan.kind == "elastic":
        _check_seen(job)
    if job.plan.kind != "plain":
        _check_no_commit_is_lost(job)


def _check_exit_codes(job: Job) -> None:
    wanted = foretold.exit_code(job)
    for agent in job.agents:
        code = agent.process.returncode
        due = 128 + signal.SIGTERM if agent.asked else wanted
        due = -signal.SIGKILL if agent.killed else due
        if code != due:
            raise Odd(f"agent {agent.number} ended with {code}, and {due} was foretold")


def _check_nothing_is_left(job: Job, shared_before: set[str]) -> None:
    tmp = job.folder / "tmp"
    files = sorted(p.name for p in tmp.iterdir() if not p.name.startswith("torchinductor_"))
    if files and not _without_reaper(job):
        raise Odd(f"files are left: {files}")
    new = shared_memory() - shared_before
    if new and (mine := new - _mapped(new)):
        raise Odd(f"shared memory is left: {sorted(mine)}")


def _without_reaper(job: Job) -> bool:
    """Tell whether a launcher may have died that had lost its reaper before."""
    reapers = any("reaper" in death.kill.victim for death in job.deaths)
    return reapers and any(agent.killed for agent in job.agents)


def _mapped(names: set[str]) -> set[str]:
    """Return which shared memory some living process has mapped: another job's."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text()
            found |= {name for name in names if name in maps}
    return found


def _check_commits(job: Job) -> None:
    """Check that each step was committed once, by one whole round, and rounds in their order."""
    paths = sorted((job.folder / "commits").glob("[0-9]*"))
    commits = [json.loads(path.read_text()) for path in paths]
    if [int(path.name) for path in paths] != list(range(len(paths))):
        raise Odd(f"a commit is missing: {[path.name for path in paths]}")
    rounds = [commit["round"] for commit in commits]
    if rounds != sorted(rounds):
        runs = [number for number, _ in groupby(rounds)]
        raise Odd(f"an older round has committed after a newer one: {runs}")
    for step, commit in enumerate(commits):
        if sorted(commit["samples"]) != list(range(SAMPLES)):
            raise Odd(f"step {step} has the wrong samples: {commit}")
    well = foretold.exit_code(job) == 0
    if [commit["last"] for commit in commits].count(True) != well:
        raise Odd("the last commit is missing, or not the last")


def _check_seen(job: Job) -> None:
    """Check that the state of every rank that came to the end has each sample once."""
    ends = [entry["seen"] for entry in job.said() if entry["word"] == "seen"]
    if not ends and foretold.exit_code(job) == 0:
        raise Odd("no rank came to the end")
    for seen in ends:
        if seen != [[step, [1.0] * SAMPLES] for step in range(len(seen))]:
            raise Odd("a sample was not seen exactly once")
    pids = {entry["pid"] for entry in job.said() if entry["word"] == "begin"}
    again = sum(death.kill.victim == "agent stopped" for death in job.deaths)  # and came back
    most = job.plan.nproc * (job.plan.agents + again) + sum(d.kill.deaths for d in job.deaths)
    if len(pids) > most:
        raise Odd(f"{len(pids)} processes have trained, though {most} would have done")


def _check_no_commit_is_lost(job: Job) -> None:
    """Check that who begins after a commit was seen begins no earlier than that commit."""
    steps = 0
    words: list[dict[str, Any]] = sorted(job.said(), key=lambda entry: entry["at"])
    for entry in words:
        if entry["word"] == "committed":
            steps = max(steps, entry["step"])
        elif entry["word"] == "begin" and entry["step"] < steps:
            raise Odd(f"a rank has begun at step {entry['step']}, and {steps} were committed")
