"""Leftovers: ranks of jobs that are over, which keep memory, GPUs and ports."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dure.cli.doctor.finding import Finding, fine, warning

__all__ = ["Member", "judge", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process that was started in a job, by `DURE_LAUNCHER` in its environment.

    `parent_in_job` and `parent_is_init` tell where it hangs in the tree of processes.
    """

    pid: int
    job: str
    command: str
    age_s: float
    resident: int = 0
    parent_in_job: bool = False
    parent_is_init: bool = False


def read() -> list[Member]:
    """Look through this user's processes."""
    jobs: dict[int, str] = {}
    entries: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid():
                job = _job(process.pid)
                if job:
                    jobs[process.pid] = job
                    entries.append(process)
    found: list[Member] = []
    for process in entries:
        with contextlib.suppress(psutil.Error, OSError):
            parent = process.ppid()
            found.append(
                Member(
                    pid=process.pid,
                    job=jobs[process.pid],
                    command=process.name(),
                    age_s=time.time() - process.create_time(),
                    resident=process.memory_info().rss,
                    parent_in_job=jobs.get(parent) == jobs[process.pid],
                    parent_is_init=parent == 1,
                )
            )
    return found


def _job(pid: int) -> str:
    """Return the job that a process was started in; empty if none."""
    mark = b"DURE_LAUNCHER="
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(
        (e[len(mark) :].decode(errors="replace") for e in entries if e.startswith(mark)), ""
    )


def judge(members: list[Member]) -> list[Finding]:
    """Name those that nobody waits for any more."""
    left = [member for member in members if member.parent_is_init and not member.parent_in_job]
    if not left:
        running = len({member.job for member in members})
        return [fine("leftovers", f"none ({running} jobs are running)")]
    names = ", ".join(f"{m.command} (pid {m.pid}, {m.age_s / 60:.0f} min)" for m in left[:8])
    numbers = " ".join(str(member.pid) for member in left[:8])
    return [
        warning(
            "leftovers",
            f"{len(left)} processes of jobs whose launcher is gone: {names}",
            f"If they are not wanted (an elastic job may go on): kill {numbers}",
        )
    ]
