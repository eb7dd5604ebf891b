"""Starting one rank, and what the launcher holds of it.

A rank is started by `subprocess` (vfork and exec: nothing of the launcher runs in between) in a
session of its own, so that the terminal's Ctrl-C reaches the launcher alone and it alone decides.
The launcher holds three pipes (output, errors, reports) and a pidfd. The rank is not reaped when it
ends: its zombie keeps the number of its session from being reused until the job is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dure.launch.child import STACK_SIGNAL
from dure.launch.spec import Exit, JobSpec, Kind

__all__ = ["RankProcess", "guarded", "start_rank"]

_GUARDIAN = str(Path(__file__).with_name("processes.py"))
_CHILD = str(Path(__file__).with_name("child.py"))


@dataclass(slots=True)
class RankProcess:
    """A started rank: its process and the launcher's ends of its pipes."""

    rank: int
    host: str
    kind: Kind
    process: subprocess.Popen[bytes]
    pidfd: int
    report_fd: int

    @property
    def pid(self) -> int:
        """The process number."""
        return self.process.pid

    @property
    def stdout(self) -> IO[bytes]:
        """What the rank prints."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """What the rank complains about."""
        assert self.process.stderr is not None
        return self.process.stderr

    def exit(self) -> Exit | None:
        """Return how the process ended, or None while it runs; it stays a zombie."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return Exit(code=info.si_status)
        return Exit(signal=info.si_status)

    def signal(self, number: int) -> None:
        """Send a signal, which is nothing to a process that has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_stack(self) -> bool:
        """Ask for the Python stack; False where nobody would answer."""
        if not self._runs_program():
            return False
        self.signal(STACK_SIGNAL)
        return True

    def interrupt(self) -> None:
        """Send SIGINT to the program, but end an interpreter that has not come to it yet.

        While it still starts, an interpreter would answer SIGINT with a traceback of no use.
        """
        ready = self.kind == "executable" or self._runs_program()
        self.signal(signal.SIGINT if ready else signal.SIGTERM)

    def _runs_program(self) -> bool:
        """Whether the bootstrap is done: only then does the process catch STACK_SIGNAL.

        The kernel knows. It is asked because that signal kills a process that does not catch it:
        one that is still starting, or one whose program was replaced by exec.
        """
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        caught = next((x for x in status.splitlines() if x.startswith("SigCgt:")), "SigCgt: 0")
        return bool(int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)

    def release(self) -> None:
        """Reap the process, which must have ended, and close what the launcher holds of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0)
        self.stdout.close()
        self.stderr.close()
        os.close(self.report_fd)
        os.close(self.pidfd)


def start_rank(spec: JobSpec, rank: int, variables: Mapping[str, str], key_fd: int) -> RankProcess:
    """Start one rank with the environment `variables`.

    Raises:
        OSError: The process cannot be started; nothing of it is left.
    """
    report_read, report_write = os.pipe()
    reads_stdin = spec.stdin == "rank0" and rank == 0
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, _CHILD, str(report_write), str(os.getpid())),
                *(spec.kind, spec.program, *spec.args),
            ],
            stdin=None if reads_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(variables),
            pass_fds=(report_write, key_fd),
            start_new_session=True,
        )
    except BaseException:
        os.close(report_read)
        raise
    finally:
        os.close(report_write)
    pidfd = os.pidfd_open(process.pid)
    return RankProcess(rank, socket.gethostname(), spec.kind, process, pidfd, report_read)


@contextlib.contextmanager
def guarded(job: str) -> Iterator[None]:
    """Keep a guardian: a process that ends what is left of the job if the launcher is killed.

    Ranks end with the launcher by themselves (see `child.py`), but what they started does not. The
    guardian waits at a pipe whose other end only the launcher holds, so it cannot miss its death;
    it lives in a session of its own, so that what kills the launcher's does not reach it.
    Cost: 20 ms of processor time, beside the start of the ranks.
    """
    read, write = os.pipe()
    try:
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARDIAN, str(read), job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read,),
            start_new_session=True,
        )
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()
        os.close(write)
