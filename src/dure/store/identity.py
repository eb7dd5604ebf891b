"""Who a process is, so that another can tell whether it lives and whether it shares our memory.

A process number alone says little: numbers are used again, and mean something only within one boot
of one machine and one PID namespace. Together with the time the process started, the boot's id and
the namespace's inode they name one process for ever. Nothing here asks a name server.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec
import psutil

from dure import env

__all__ = ["Identity", "alive", "myself", "process_at"]


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """One process.

    Attributes:
        pid: Its number, in its PID namespace.
        start: When it started, in a form only equality makes sense of.
        host: The machine's name, or DURE_HOST_ID, for people.
        host_id: Equal for processes that can reach each other's memory: same boot of the same
            machine, same PID namespace, same user, same DURE_HOST_ID.
    """

    pid: int
    start: str
    host: str
    host_id: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def myself() -> Identity:
    """Return who this process is."""
    found = process_at(os.getpid())
    assert found is not None
    return found


def process_at(pid: int) -> Identity | None:
    """Return who the process `pid` of this host is; None if there is none."""
    start = _start(pid)
    host = env.text("DURE_HOST_ID") or socket.gethostname()
    return None if start is None else Identity(pid, start, host, _host_id())


def alive(process: Identity) -> bool | None:
    """Tell whether `process` lives; None if that cannot be known from here (another host)."""
    if process.host_id != _host_id():
        return None
    return _start(process.pid) == process.start


def _start(pid: int) -> str | None:
    """Return when `pid` started; None if there is no such process, or it is a zombie."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
        return None if fields[0] in "ZX" else fields[19]
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def _host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
    except OSError:
        boot, namespace = f"{socket.gethostname()} {psutil.boot_time():.0f}", ""
    return f"{boot} {namespace} {os.getuid()} {env.text('DURE_HOST_ID') or ''}".rstrip()
