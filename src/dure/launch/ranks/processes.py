"""Which processes belong to a job, and how to signal them and no others.

A rank may start other processes, and those may leave their parent, their process group and their
session. A process belongs to the job if any of these holds:

- it descends from a rank (walking parents);
- it is in the session of a rank (each rank starts one, and the launcher keeps a dead rank as a
  zombie until the job is over, so that the number of its session is not reused);
- it descends from the launcher, was started after the job began, and is in another session than
  the launcher: an orphan that the launcher has adopted. The launcher's own children are in its
  session, except the zygote and the reaper, which are spared;
- it has the job's name in its environment (`DURE_LAUNCHER`);
- it was found to belong to the job before.

The launcher adopts orphans, so all of them descend from it, and it looks at its descendants alone.
A reaper, or a kernel that does not list children, looks at all processes of the host.

A process is *detached* if it has left the rank's session: it was started to outlive the rank
(TensorBoard, an uploader). A rank's own workers are in it.

All of this is read from /proc. A process is known by its number and the time of its start. Between
reading and signalling it may end and its number be reused: so a pidfd is opened first, then
membership is read, then the pidfd is signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "JobProcesses",
    "Process",
    "adopting_orphans",
    "now",
    "reap_orphans",
    "remove_files",
    "start_times",
]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc says of a process; `start` is in clock ticks since the machine booted."""

    pid: int
    parent: int
    session: int
    state: str
    start: int
    command: str

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


_Find = Callable[[int], Process | None]
"""Looks a process up by its number."""


def now() -> int:
    """Return the time in the unit of `Process.start`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def start_times(pids: Iterable[int]) -> dict[int, int]:
    """Return when each process was started; of one that is gone, nothing."""
    return {process.pid: process.start for process in map(_read, pids) if process is not None}


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the command itself may have brackets and spaces
    fields = tail.split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        start=int(fields[19]),
        command=head.partition("(")[2],
    )


def _all_processes() -> dict[int, Process]:
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def _children(pid: int) -> list[int]:
    """Return the children of a process, those of all of its threads; none of one that is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _descendants(root: int) -> dict[int, Process]:
    """Return the processes below `root`; all of the host if this kernel lists no children."""
    if not os.path.exists("/proc/thread-self/children"):
        return _all_processes()
    found: dict[int, Process] = {}
    waiting = _children(root)
    while waiting:
        pid = waiting.pop()
        process = None if pid in found else _read(pid)
        if process is not None:
            found[pid] = process
            waiting += _children(pid)
    return found


def _has_variable(pid: int, entry: bytes) -> bool:
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


class JobProcesses:
    """The processes of one job.

    Args:
        ranks: The start time of each rank (`start_times`), by its process number.
        job: The value of `DURE_LAUNCHER` in the job's environment.
        spared: Processes of the launcher's own: the zygote, the reaper.
        below: The process that all descend from; None: look at every process of the host.
        since: When the job began, if orphans that this process has adopted belong to it (`now`).
    """

    def __init__(
        self,
        ranks: Mapping[int, int],
        job: str,
        spared: Iterable[int] = (),
        below: int | None = None,
        since: int | None = None,
    ) -> None:
        self.ranks = ranks
        self._below = below
        self._since = since
        self.spared = frozenset(spared)
        self._entry = f"DURE_LAUNCHER={job}".encode()
        self._me, self._session = os.getpid(), os.getsid(0)
        self._known: dict[int, int] = {}  # start times of those that were found

    def others(self, *, detached: bool = True) -> list[Process]:
        """List the job's living processes except the ranks, and reap adopted ones that have died.

        Args:
            detached: Whether to list those that have left the session of their rank.

        Cost:
            Reads a small file or two for each process, and one for each thread, of the job; if
            `below` is not known, two for each process of the host.
        """
        found = self._look()
        if not found:  # one that ends while its parent's children are listed may hide another
            found = self._look()
        return [p for p in found if detached or p.session in self.ranks]

    def living(self) -> list[int]:
        """List the living processes of the job, the ranks included."""
        ranks = [process for process in map(_read, self.ranks) if self._is_rank(process)]
        return [p.pid for p in (*ranks, *self.others()) if p is not None and not p.dead]

    def _look(self) -> list[Process]:
        everyone = _all_processes() if self._below is None else _descendants(self._below)
        mine = [
            process
            for process in everyone.values()
            if process.pid not in self.ranks and self._owns(process, everyone.get)
        ]
        self._known.update((process.pid, process.start) for process in mine)
        for process in mine:
            if process.state == "Z" and process.parent == self._me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        return [process for process in mine if not process.dead]

    def signal(self, pid: int, number: int) -> bool:
        """Send signal `number` to process `pid` if it still is one of the job's.

        Cost:
            Reads a small file for each of its ancestors up to a rank.
        """
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            process = _read(pid)
            if process is None or not (self._is_rank(process) or self._owns(process, _read)):
                return False
            signal.pidfd_send_signal(fd, number)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def kill_all(self, seconds: float = 5.0) -> None:
        """Kill every process of the job, the ranks included, and wait until they are gone."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            living = self.living()
            if not living:
                return
            for pid in living:
                self.signal(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _is_rank(self, process: Process | None) -> bool:
        return process is not None and self.ranks.get(process.pid) == process.start

    def _owns(self, process: Process, find: _Find) -> bool:
        if process.pid == self._me or process.pid in self.spared:
            return False
        if process.session in self.ranks or self._known.get(process.pid) == process.start:
            return True
        return self._is_below(process, find) or _has_variable(process.pid, self._entry)

    def _is_below(self, process: Process, find: _Find) -> bool:
        """Walk up the parents; a loop (numbers reused while reading) ends the walk."""
        child, seen = process, set[int]()
        while child.pid not in seen:
            seen.add(child.pid)
            if child.parent in self.ranks:
                return True
            if child.parent == self._me:
                adopted = self._since is not None and process.start >= self._since
                return adopted and process.session != self._session
            parent = find(child.parent)
            if parent is None or parent.pid in self.spared:
                return False
            if self._known.get(parent.pid) == parent.start:
                return True
            child = parent
        return False


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make orphaned grandchildren children of this process, not of init, while the job runs.

    They can then be reaped here, and vanish from /proc at once when they end.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap_orphans(kept: Iterable[int]) -> None:
    """Reap children of this process that have died, except `kept`: strangers' orphans, if PID 1."""
    for pid in set(_children(os.getpid())).difference(kept):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def remove_files(job: str) -> None:
    """Remove the directory of the job's error files (`errorfiles.private_directory`)."""
    import shutil  # lazy: a reaper that has nothing to do need not pay for them
    import tempfile  # lazy: as before

    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"dure_{job}"), ignore_errors=True)
