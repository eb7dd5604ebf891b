"""Limits of the process: locked memory, files, processes, room for temporary files."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dure.cli.doctor.cgroup import pids_limit
from dure.cli.doctor.finding import Finding, fine, problem, size, warning

__all__ = ["Limits", "judge", "read"]

_INFINITE = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Soft limits, with None for none; `fabric` says that there is a network for RDMA."""

    locked: int | None
    files: int | None
    processes: int | None
    pids: int | None = None
    num_pids: int = 0
    temporary_free: int = 1 << 40
    temporary: str = "/tmp"
    fabric: bool = False


def _soft(name: int) -> int | None:
    limit = resource.getrlimit(name)[0]
    return None if limit == _INFINITE else limit


def read() -> Limits:
    """Read from the system."""
    folder = tempfile.gettempdir()
    disk = os.statvfs(folder)
    return Limits(
        locked=_soft(resource.RLIMIT_MEMLOCK),
        files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        pids=pids_limit(),
        num_pids=sum(name.isdigit() for name in os.listdir("/proc")),
        temporary_free=disk.f_bavail * disk.f_frsize,
        temporary=folder,
        fabric=Path("/sys/class/infiniband").is_dir(),
    )


def judge(limits: Limits) -> list[Finding]:
    """Say which limit a job would run into."""
    found = [_judge_locked(limits), _judge_files(limits), _judge_processes(limits)]
    free = size(limits.temporary_free)
    if limits.temporary_free < 100 << 20:
        found.append(
            problem(
                "temporary files",
                f"{free} free in {limits.temporary}",
                "Free some, or set TMPDIR: torch's compiler and shared tensors write there.",
            )
        )
    else:
        found.append(fine("temporary files", f"{free} free in {limits.temporary}"))
    return found


def _judge_locked(limits: Limits) -> Finding:
    if limits.locked is None:
        return fine("locked memory", "no limit")
    text = f"at most {size(limits.locked)}"
    if limits.fabric and limits.locked < 1 << 30:
        return problem(
            "locked memory",
            f"{text}, and there is an RDMA network, which locks its buffers",
            "ulimit -l unlimited (limits.conf: memlock; Slurm: PropagateResourceLimits; docker: "
            "--ulimit memlock=-1).",
        )
    return fine("locked memory", f"{text} (enough without RDMA)")


def _judge_files(limits: Limits) -> Finding:
    if limits.files is None:
        return fine("open files", "no limit")
    text = f"at most {limits.files} a process"
    if limits.files < 256:
        return problem("open files", text, "ulimit -n 65536")
    if limits.files < 1024:
        return warning("open files", f"{text}: few for DataLoader workers", "ulimit -n 65536")
    return fine("open files", text)


def _judge_processes(limits: Limits) -> Finding:
    known = [n for n in (limits.processes, limits.pids) if n is not None]
    if not known:
        return fine("processes", "no limit")
    least = min(known)
    text = f"at most {least} processes and threads, {limits.num_pids} processes are there"
    if least - limits.num_pids < 64:
        return problem(
            "processes",
            f"{text}: ranks and their threads will not start",
            "ulimit -u, or docker --pids-limit / the pod's limit, must be raised.",
        )
    if least < 1024:
        return warning("processes", text, "Set OMP_NUM_THREADS low, or raise the limit.")
    return fine("processes", text)
