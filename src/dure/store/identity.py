"""The identity of a process: with it another one knows whether it lives and shares our memory.

A process number alone says little: numbers are used again, and mean something only within one boot
of one machine and one PID namespace. Together with the time the process started, the boot's id and
the namespace's inode they name one process forever. Nothing here asks a name server.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from dure import env
from dure.errors import UsageError

__all__ = ["Identity", "alive", "host_name", "myself", "start_of", "stat_of"]


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


class _ProcNotMounted(UsageError, OSError):
    """The files of /proc cannot be read."""


def myself() -> Identity:
    """Return the identity of this process.

    Raises:
        UsageError: /proc is not mounted; an OSError, too.
    """
    return Identity(os.getpid(), start_of(os.getpid()) or "", host_name(), _host_id())


def host_name() -> str:
    """Return what messages call this host."""
    return env.text("DURE_HOST_ID") or socket.gethostname()


def alive(process: Identity) -> bool | None:
    """Return whether `process` lives; None if that cannot be known from here.

    It may be on another host, or this process may have no descriptor left to look with.
    """
    try:
        if process.host_id != _host_id():
            return None
        return _read_start(process.pid) == process.start
    except OSError:
        return None


def start_of(pid: int) -> str | None:
    """Return when `pid` started; None if there is no such process, or it is a zombie."""
    try:
        return _read_start(pid)
    except OSError:
        return None


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process that follow its name in /proc: its state, its parent, ...

    Raises:
        OSError: There is no such process, or the system refuses to say.
    """
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The name before them may contain anything, also a part of a character.
    return stat.rpartition(b")")[2].decode("ascii").split()


def _read_start(pid: int) -> str | None:
    """Do what `start_of` does; raise if the system refuses to say."""
    try:
        fields = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
    except FileNotFoundError as error:
        raise _ProcNotMounted(
            "processes cannot be identified: /proc is not mounted here",
            seen=str(error),
            fix="Mount it: `mount -t proc proc /proc`.",
        ) from None
    return f"{boot} {namespace} {os.getuid()} {env.text('DURE_HOST_ID') or ''}".rstrip()
