"""Which processes belong to a job, and how to signal them without hitting a stranger.

A rank may start other processes, and those may leave their parent, their process group and their
session. A process belongs to the job if any of these holds:

- it descends from a rank (walking parents);
- it is in the session of a rank (each rank starts one, and the launcher keeps a dead rank as a
  zombie until the job is over, so that the number of its session cannot be given to a stranger);
- it was started with the job's name in its environment (`DURE_LAUNCHER`), which a daemon keeps
  when it leaves its parent and session.

The launcher adopts orphans, so all of them descend from it, and a look goes down from the launcher
alone: it reads of the job's processes only. A reaper, or a kernel that does not list children,
looks at all processes of the host.

A process is *detached* if it has left the rank's session: somebody started it to outlive the rank
(TensorBoard, an uploader). A rank's own workers are in it.

All of this is read from /proc. Between reading and signalling, a process may end and its number be
given to another: so a pidfd is opened first, then membership is read, then the pidfd is signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["JobProcesses", "Process", "adopting_orphans", "remove_files"]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    session: int
    state: str
    command: str


_Find = Callable[[int], Process | None]
"""Looks a process up by its number."""


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the command itself may hold brackets and spaces
    fields = tail.split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
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
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def _descendants(root: int) -> dict[int, Process]:
    """Return the processes below `root`; all of the host where this kernel lists no children."""
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


def _is_dead(pid: int) -> bool:
    """Tell whether a rank, which nobody has reaped, has ended."""
    process = _read(pid)
    return process is None or process.state in "ZX"


def _has_variable(pid: int, entry: bytes) -> bool:
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


class JobProcesses:
    """The processes of one job.

    Args:
        ranks: The process number of each rank; none of them may be reaped yet.
        job: The value of `DURE_LAUNCHER` in the job's environment.
        spared: Processes of the launcher's own that carry that variable, too: the zygote.
        below: The process that all descend from; None: look at every process of the host.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        job: str,
        spared: tuple[int, ...] = (),
        below: int | None = None,
    ) -> None:
        self._ranks = frozenset(ranks)
        self._below = below
        self._spared = frozenset(spared)
        self._entry = f"DURE_LAUNCHER={job}".encode()
        self._me = os.getpid()
        self._known: set[int] = set()

    def others(self, *, detached: bool = True) -> list[Process]:
        """List the job's living processes except the ranks, and reap those that died to us.

        Args:
            detached: Whether those count that have left the session of their rank.

        Cost: reads a small file or two for each process, and one for each thread, of the job; where
        `below` is not known, two for each process of the host.
        """
        found = self._look()
        if not found:  # one that ends while its parent's children are listed may hide another
            found = self._look()
        return [p for p in found if detached or p.session in self._ranks]

    def _look(self) -> list[Process]:
        everyone = _all_processes() if self._below is None else _descendants(self._below)
        mine = [
            process
            for process in everyone.values()
            if process.pid not in self._ranks
            and (self._has_died(process) or self._owns(process, everyone.get))
        ]
        self._known.update(process.pid for process in mine)
        for process in mine:
            if process.state == "Z" and process.parent == self._me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        return [process for process in mine if process.state not in "ZX"]

    def _has_died(self, process: Process) -> bool:
        """Whether it is one of the job's that died to us: it has no environment any more."""
        return process.state == "Z" and process.parent == self._me and process.pid in self._known

    def signal(self, pid: int, number: int) -> bool:
        """Send signal `number` to process `pid` if it still is one of the job's.

        Cost: reads a small file for each of its ancestors up to a rank.
        """
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            process = _read(pid)
            if process is None or not (pid in self._ranks or self._owns(process, _read)):
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
            running = [pid for pid in self._ranks if not _is_dead(pid)]
            others = [process.pid for process in self.others()]
            if not running and not others:
                return
            for pid in (*running, *others):
                self.signal(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _owns(self, process: Process, find: _Find) -> bool:
        if process.pid == self._me or process.pid in self._spared:
            return False
        if process.session in self._ranks or self._descends(process, find):
            return True
        return _has_variable(process.pid, self._entry)

    def _descends(self, process: Process, find: _Find) -> bool:
        """Walk up the parents; a loop (numbers reused while reading) ends the walk."""
        seen: set[int] = set()
        while process.pid not in seen:
            seen.add(process.pid)
            if process.parent in self._ranks:
                return True
            parent = find(process.parent)
            if parent is None or parent.pid == self._me:
                return False
            process = parent
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


def remove_files(job: str) -> None:
    """Remove the directory of the job's error files (`errorfiles.private_directory`)."""
    import shutil  # lazy: a reaper that has nothing to do need not pay for them
    import tempfile  # lazy: as before

    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"dure_{job}"), ignore_errors=True)
