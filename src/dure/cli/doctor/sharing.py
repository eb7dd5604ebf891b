"""Shared memory: what the engine of one host stands on, and what containers take from it.

Dure's segments are anonymous (memfd): a peer opens them through `/proc/PID/fd`, which a container,
`hidepid` or a seccomp filter may forbid. `/dev/shm` is not used by Dure, but by torch's DataLoader
workers and by NCCL, and containers make it 64 MB small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dure.cli.doctor.finding import Finding, fine, problem, size, warning

__all__ = ["Sharing", "judge", "read"]

_SMALL = 256 << 20
_CHILD = """
import os, sys
fd = os.memfd_create("dure-doctor")
os.write(fd, b"seen")
print(fd, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """`*_error` are empty where it worked; sizes in bytes, None where there is no /dev/shm."""

    shm_total: int | None
    shm_free: int = 0
    shm_writable: bool = True
    memfd_error: str = ""
    peer_error: str = ""
    pidfd_error: str = ""
    ptrace_scope: int | None = None
    seccomp: bool = False
    container: str = ""


def read() -> Sharing:
    """Try each of them, the peer with a child of this process."""
    total, free, writable = None, 0, False
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        total, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
        writable = os.access("/dev/shm", os.W_OK)
    memfd_error = _error_of(lambda: os.close(os.memfd_create("dure-doctor")))
    return Sharing(
        shm_total=total,
        shm_free=free,
        shm_writable=writable,
        memfd_error=memfd_error,
        peer_error="" if memfd_error else _error_of(_open_peer),
        pidfd_error=_error_of(lambda: os.close(os.pidfd_open(os.getpid()))),
        ptrace_scope=_ptrace_scope(),
        seccomp="Seccomp:\t2" in Path("/proc/self/status").read_text(),
        container=_container(),
    )


def _error_of(action: object) -> str:
    """Return why `action` failed, or nothing."""
    assert callable(action)
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def _open_peer() -> None:
    """Open a child's anonymous memory as a rank opens its peer's."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        number = int(child.stdout.readline())
        with open(f"/proc/{child.pid}/fd/{number}", "rb") as file:
            if file.read() != b"seen":
                raise OSError(0, "another content was read than was written")
    except ValueError:
        raise OSError(0, "the child that was to share memory did not start") from None
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def _ptrace_scope() -> int | None:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return None


def _container() -> str:
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if os.path.exists(path):
            return name
    return "singularity" if os.path.exists("/singularity") else ""


def judge(sharing: Sharing) -> list[Finding]:
    """Say whether ranks of this host can share memory."""
    return [_judge_shm(sharing), *_judge_engine(sharing), _judge_place(sharing)]


def _judge_shm(sharing: Sharing) -> Finding:
    if sharing.shm_total is None:
        return warning("/dev/shm", "there is none", "Mount a tmpfs there: DataLoader needs it.")
    text = f"{size(sharing.shm_free)} of {size(sharing.shm_total)} free"
    if not sharing.shm_writable:
        return warning("/dev/shm", "it cannot be written", "chmod 1777 /dev/shm")
    if sharing.shm_free < _SMALL:
        return warning(
            "/dev/shm",
            f"{text}: DataLoader workers and NCCL may die with SIGBUS (Dure does not use it)",
            "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: "
            "Memory; else `df /dev/shm`, and remove what is left there.",
        )
    return fine("/dev/shm", text)


def _judge_engine(sharing: Sharing) -> list[Finding]:
    found: list[Finding] = []
    if sharing.memfd_error:
        found.append(
            problem(
                "shared memory",
                f"anonymous memory is refused: {sharing.memfd_error}",
                "A seccomp profile forbids memfd_create: allow it, or use backend='gloo'.",
            )
        )
    elif sharing.peer_error:
        found.append(
            problem(
                "shared memory",
                f"a peer's memory cannot be opened through /proc/PID/fd: {sharing.peer_error}",
                "Ranks must be one user's, in one PID namespace, and /proc mounted without "
                "hidepid=2; or use backend='gloo'.",
            )
        )
    else:
        found.append(fine("shared memory", "anonymous memory is shared with a peer"))
    if sharing.pidfd_error:
        found.append(
            problem(
                "process watch",
                f"pidfd_open is refused: {sharing.pidfd_error}",
                "Linux 5.3 or newer, and a seccomp profile that allows it (a newer docker).",
            )
        )
    return found


def _judge_place(sharing: Sharing) -> Finding:
    text = f"in a {sharing.container} container" if sharing.container else "no container seen"
    text += ", with a seccomp filter" if sharing.seccomp else ""
    if sharing.ptrace_scope is not None and sharing.ptrace_scope >= 2:
        return warning(
            "ptrace",
            f"{text}; ptrace is for root alone (scope {sharing.ptrace_scope}): py-spy and gdb "
            "cannot look at ranks, and large tensors take one more copy",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    scope = "unrestricted" if not sharing.ptrace_scope else "of descendants only"
    return fine("ptrace", f"{text}; ptrace {scope}")
